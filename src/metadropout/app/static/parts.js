// Parts that the tabs share: bars of probabilities, choices and sliders, maps in colour.
import { announce, colour, make, percent } from "./dom.js";

export class Bars {
  constructor(element, { speak = true } = {}) {
    this.verdict = make("p", { class: "verdict" });
    this.list = make("ul", { class: "bars", "aria-label": "Probability of each class" });
    element.replaceChildren(this.verdict, this.list);
    this.speak = speak;
  }

  // classes: [{name, number}]; probabilities: one for each of them, or null.
  show(classes, probabilities, hint = "") {
    while (this.list.children.length > classes.length) this.list.lastChild.remove();
    while (this.list.children.length < classes.length) {
      const track = make("span", { class: "track" }, make("span", { class: "fill" }));
      this.list.append(make("li", {}, make("span", { class: "name" }), track, make("span", { class: "value" })));
    }
    const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
    classes.forEach(({ name, number }, i) => {
      const row = this.list.children[i], p = probabilities?.[i];
      colour(row, number);
      row.querySelector(".name").textContent = name;
      row.querySelector(".fill").style.width = `${100 * (p ?? 0)}%`;
      row.querySelector(".value").textContent = p == null ? "" : percent(p);
      row.classList.toggle("best", i === best);
    });
    if (best < 0) {
      this.verdict.replaceChildren(make("small", {}, hint));
      return;
    }
    const sure = probabilities[best], name = classes[best].name;
    const words = sure >= 0.8 ? `It is ${name}` : sure >= 0.5 ? `Probably ${name}` : `Not sure, perhaps ${name}`;
    this.verdict.textContent = words;
    if (this.speak) announce(`${words}, ${percent(sure)}`);
  }
}

export function choice(label, options, value, onChange) {
  const select = make("select", { onchange: () => onChange(select.value) });
  for (const [key, text] of options) select.append(make("option", { value: key, selected: key === value }, text));
  return make("label", {}, label, select);
}

export function slider(label, { min, max, value, describe = String, onInput }) {
  // Not an <output>, which would take the label for itself.
  const shown = make("span", { class: "shown" }, describe(value));
  const input = make("input", { type: "range", min, max, step: 1, value, "aria-label": label, "aria-valuetext": describe(value) });
  input.addEventListener("input", () => {
    shown.textContent = describe(Number(input.value));
    input.setAttribute("aria-valuetext", describe(Number(input.value)));
    onInput(Number(input.value));
  });
  return make("label", {}, make("span", {}, `${label}: `, shown), input);
}

// How many noise samples are taken where nobody chooses: as many as answers within 300 ms of a stroke allow.
export const usualSamples = (images) => Math.max(1, Math.min(10, Math.floor(50 / Math.max(1, images))));

export function adaptControls(element, models, state, onChange) {
  element.replaceChildren();
  const describe = (model) => `${model.method}, ${model.data} ${model.way}-way ${model.shot}-shot`;
  const texts = models.map(describe);
  const named = models.map((m, i) => [m.name, texts.filter((t) => t === texts[i]).length > 1 ? m.name : texts[i]]);
  element.append(choice("Weights", named, state.weights, (name) => {
    state.weights = name;
    state.steps = null;
    adaptControls(element, models, state, onChange);
    onChange(true);
  }));
  const model = models.find((m) => m.name === state.weights);
  if (model.adapts) {
    element.append(slider("Steps of adapting", { min: 0, max: 10, value: state.steps ?? model.steps, onInput: (n) => { state.steps = n; onChange(); } }));
  }
  if (model.noise) {
    const describe = (n) => (n ? String(n) : "automatic");
    element.append(slider("Noise samples", { min: 0, max: 30, value: state.samples ?? 0, describe, onInput: (n) => { state.samples = n || null; onChange(); } }));
  }
}

const SCALES = {
  viridis: ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"],
  magma: ["000004", "1c1044", "4f127b", "812581", "b5367a", "e55064", "fb8761", "fec287", "fcfdbf"],
  grey: ["000000", "ffffff"],
};

export function bytes(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }

export function paintMap({ width, height, data }, scale, label) {
  const canvas = make("canvas", { width, height, role: "img", "aria-label": label });
  const stops = SCALES[scale].map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const values = bytes(data), picture = new ImageData(width, height);
  values.forEach((value, i) => {
    const place = (value / 255) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(place));
    for (let c = 0; c < 3; c++) picture.data[4 * i + c] = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
    picture.data[4 * i + 3] = 255;
  });
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

// An image in the shape of the weights, as the network gets it.
export function paintImage(text, [channels, height, width], label) {
  if (channels === 1) return paintMap({ width, height, data: text }, "grey", label);
  const canvas = make("canvas", { width, height, role: "img", "aria-label": label });
  const values = bytes(text), picture = new ImageData(width, height), size = width * height;
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) picture.data[4 * i + c] = values[c * size + i];
    picture.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}
