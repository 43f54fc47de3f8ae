// A sheet of paper: drawn on by mouse, pen, finger or keyboard.
import { announce, icon, make } from "./dom.js";

const SIZE = 28; // pixels of the images that weights of drawings take
const FINE = 4; // parts into which each of them is divided while strokes become pixels
const PEN = 1.5; // width of a stroke in pixels, as in the characters of training
const SHOWN_PEN = 1.15; // the same on the page
const REACH = 10; // pixels from the middle to the farthest point of a character, as in the characters of training

const fine = new OffscreenCanvas(SIZE * FINE, SIZE * FINE).getContext("2d", { willReadFrequently: true });

function trace(context, strokes, map, width) {
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  for (const stroke of strokes) {
    const points = stroke.map(map);
    context.beginPath();
    context.moveTo(...points[0]);
    if (points.length === 1) context.lineTo(points[0][0] + 0.01, points[0][1]);
    for (let i = 1; i < points.length - 1; i++) {
      const [x, y] = points[i], [u, v] = points[i + 1];
      context.quadraticCurveTo(x, y, (x + u) / 2, (y + v) / 2);
    }
    if (points.length > 1) context.lineTo(...points.at(-1));
    context.stroke();
  }
}

// Strokes as the image that the network gets: in the middle, of the usual size, ink = 255.
export function rasterise(strokes) {
  const points = strokes.flat();
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = Math.min(REACH / Math.max((right - left) / 2, (bottom - top) / 2, 1e-6), 3 * SIZE);
  const [x0, y0] = [(left + right) / 2, (top + bottom) / 2];
  const side = SIZE * FINE;
  fine.clearRect(0, 0, side, side);
  const place = ([x, y]) => [FINE * (SIZE / 2 + scale * (x - x0)), FINE * (SIZE / 2 + scale * (y - y0))];
  trace(fine, strokes, place, PEN * FINE);
  const { data } = fine.getImageData(0, 0, side, side);
  const image = new Uint8Array(SIZE * SIZE);
  for (let y = 0; y < SIZE; y++) {
    for (let x = 0; x < SIZE; x++) {
      let sum = 0;
      for (let j = 0; j < FINE; j++) for (let i = 0; i < FINE; i++) sum += data[4 * ((y * FINE + j) * side + x * FINE + i) + 3];
      image[y * SIZE + x] = Math.round(sum / (FINE * FINE));
    }
  }
  return btoa(String.fromCharCode(...image));
}

export class Pad {
  // label: for those who cannot see it; onStroke(finished): called while a stroke grows and when it ends.
  constructor({ label, hint = "", big = false, onStroke, onRemove = null }) {
    this.strokes = [];
    this.given = null; // the image of a glyph, as long as nothing is added to it
    this.label = label;
    this.onStroke = onStroke;
    this.cursor = null;
    this.penDown = false;
    this.canvas = make("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "drawing pad",
      "aria-keyshortcuts": "ArrowUp ArrowDown ArrowLeft ArrowRight Space Backspace Delete",
    });
    const tools = make("div", { class: "tools" }, icon("undo", `Undo in ${label}`, () => this.undo()),
      icon("clear", `Clear ${label}`, () => this.clear()));
    if (onRemove) tools.append(icon("remove", `Remove ${label}`, onRemove));
    this.element = make("div", { class: big ? "pad big" : "pad" }, this.canvas, make("span", { class: "hint" }, hint), tools);
    this.listen();
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    this.describe();
  }

  get drawn() { return this.strokes.length > 0; }
  image() { return this.drawn ? this.given ?? (this.pixels ??= rasterise(this.strokes)) : null; }

  set(strokes, image = null) {
    this.strokes = strokes.map((stroke) => stroke.map((point) => [...point]));
    this.given = image;
    this.changed(true);
  }
  clear() { this.set([]); }
  undo() { if (this.drawn) this.set(this.strokes.slice(0, -1)); }

  changed(finished) {
    this.pixels = null;
    this.paint();
    if (finished) this.describe();
    this.onStroke?.(finished);
  }

  describe() {
    this.element.classList.toggle("drawn", this.drawn);
    const count = this.strokes.length;
    const state = count ? `${count} stroke${count > 1 ? "s" : ""}` : "empty";
    this.canvas.setAttribute("aria-label",
      `${this.label}, ${state}. Draw by mouse or finger; with keys: arrows move the pen, space puts it down or up, backspace undoes.`);
  }

  listen() {
    const { canvas } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const inside = (v) => Math.min(1, Math.max(0, v));
      return [inside((event.clientX - box.left) / box.width), inside((event.clientY - box.top) / box.height)];
    };
    let pointer = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (pointer !== null || event.button > 0) return;
      event.preventDefault();
      canvas.focus({ preventScroll: true });
      pointer = event.pointerId;
      canvas.setPointerCapture(pointer);
      this.cursor = null;
      this.given = null;
      this.strokes.push([at(event)]);
      this.element.classList.add("drawn");
      this.changed(false);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId !== pointer) return;
      const stroke = this.strokes.at(-1);
      if (!stroke) return;
      const events = event.getCoalescedEvents?.() ?? [];
      for (const each of events.length ? events : [event]) {
        const [x, y] = at(each), [u, v] = stroke.at(-1);
        if (Math.hypot(x - u, y - v) > 0.004 && stroke.length < 2000) stroke.push([x, y]);
      }
      this.changed(false);
    });
    const end = (event) => {
      if (event.pointerId !== pointer) return;
      pointer = null;
      this.changed(true);
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => { this.cursor = null; this.penDown = false; this.paint(); });
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.ctrlKey || event.metaKey) {
      if (event.key === "z") this.undo(); else return;
    } else if (event.key in moves) {
      this.cursor ??= [0.5, 0.5];
      const step = (event.shiftKey ? 4 : 1) / SIZE;
      this.cursor = this.cursor.map((v, i) => Math.min(0.97, Math.max(0.03, v + step * moves[event.key][i])));
      if (this.penDown) {
        this.strokes.at(-1).push([...this.cursor]);
        this.changed(true);
      } else this.paint();
    } else if (event.key === " " || event.key === "Enter") {
      this.cursor ??= [0.5, 0.5];
      this.penDown = !this.penDown;
      if (this.penDown) {
        this.given = null;
        this.strokes.push([[...this.cursor]]);
      }
      announce(this.penDown ? "pen down" : "pen up");
      this.changed(true);
    } else if (event.key === "Backspace") this.undo();
    else if (event.key === "Delete") this.clear();
    else return;
    if (!this.drawn) this.penDown = false;
    event.preventDefault();
  }

  paint() {
    const { canvas } = this;
    const side = Math.round(canvas.clientWidth * devicePixelRatio);
    if (!side) return;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, side, side);
    context.strokeStyle = getComputedStyle(canvas).getPropertyValue("--ink");
    trace(context, this.strokes, ([x, y]) => [x * side, y * side], (SHOWN_PEN * side) / SIZE);
    if (this.cursor) {
      const [x, y] = this.cursor.map((v) => v * side);
      context.strokeStyle = getComputedStyle(canvas).getPropertyValue("--accent");
      context.lineWidth = 2 * devicePixelRatio;
      context.beginPath();
      context.arc(x, y, (this.penDown ? 4 : 8) * devicePixelRatio, 0, 7);
      context.stroke();
    }
  }
}
