// The tab for looking inside: two learners side by side on the same examples.
import { Line } from "./api.js";
import { colour, make, showError, svg } from "./dom.js";
import { Bars, choice, paintImage, paintMap, slider } from "./parts.js";

const WIDTH = 420, HEIGHT = 260;

export class See {
  constructor(models, sources, onStatus) {
    Object.assign(this, { models, sources, onStatus });
    this.source = Object.keys(sources)[0];
    this.samples = 10;
    this.steps = null;
    this.pair = [0, 1];
    this.image = 0;
    const line = (name, address, extra, onAnswer) => new Line(`see-${name}`, () => this.question(address, extra()), onAnswer, (p) => this.problem(p));
    this.lines = [
      line("classify", "/api/classify", () => ({ queries: this.current.query ? [this.current.query] : [] }), (a) => this.showProbabilities(a)),
      line("boundary", "/api/boundary", () => ({ pair: this.pair, others: this.others(), mine: this.current.query }), (a) => this.showBoundary(a)),
      line("multipliers", "/api/multipliers", () => ({}), (a) => this.showMultipliers(a)),
      line("features", "/api/features", () => ({ image: this.image }), (a) => this.showFeatures(a)),
    ];
    this.chooseModels();
  }

  get shape() { return this.models.find((m) => m.name === this.weights[0]).shape; }
  find(name) { return this.models.find((m) => m.name === name); }
  // Class names of the examples, and which image is of which class.
  labels() { return this.current.classes.flatMap((images, i) => images.map(() => this.current.used[i])); }
  others() {
    const lists = this.pair.map((i) => this.current.others[i] ?? []);
    return lists.every((list) => list.length) ? lists : [];
  }

  chooseModels() {
    const fits = this.models.filter((m) => m.adapts && this.sources[this.source].models.includes(m));
    const right = fits.find((m) => m.noise && m.name === this.sources[this.source].state.weights) ?? fits.find((m) => m.noise) ?? fits[0];
    const alike = fits.filter((m) => String(m.shape) === String(right?.shape));
    const left = alike.find((m) => !m.noise && m.data === right.data && m.way === right.way) ?? alike.find((m) => !m.noise) ?? right;
    this.alike = alike;
    this.weights = right ? [left.name, right.name] : [];
  }

  open() {
    const ready = Object.keys(this.sources).filter((name) => this.sources[name].shown.length >= 2);
    if (ready.length && !ready.includes(this.source)) { this.source = ready[0]; this.chooseModels(); }
    this.controls();
    this.refresh();
  }

  controls() {
    const box = document.getElementById("see-controls");
    box.replaceChildren();
    document.getElementById("see-source-name").textContent = this.source;
    if (Object.keys(this.sources).length > 1) {
      box.append(choice("Examples", Object.keys(this.sources).map((n) => [n, n]), this.source, (name) => { this.source = name; this.steps = null; this.chooseModels(); this.controls(); this.refresh(); }));
    }
    if (!this.weights.length) return;
    const named = this.alike.map((m) => [m.name, `${m.method}, ${m.data} ${m.way}-way`]);
    if (this.alike.length > 2) {
      ["Left", "Right"].forEach((label, i) => box.append(choice(label, named, this.weights[i], (name) => { this.weights[i] = name; this.refresh(); })));
    }
    box.append(
      slider("Noise samples S", { min: 1, max: 30, value: this.samples, onInput: (n) => { this.samples = n; this.refresh(); } }),
      slider("Inner steps", { min: 0, max: 10, value: this.steps ?? this.find(this.weights[1]).steps, onInput: (n) => { this.steps = n; this.refresh(); } }),
    );
  }

  refresh() {
    this.current = this.sources[this.source].task();
    const count = this.current.used.length;
    this.pair = this.pair.map((n, i) => (n < count ? n : i));
    this.image = Math.min(this.image, Math.max(0, this.current.classes.flat().length - 1));
    const ready = count >= 2 && this.weights.length > 0;
    for (const panel of document.querySelectorAll("#see .panel")) panel.hidden = !ready;
    if (!ready) {
      this.onStatus(this.weights.length ? "Give examples of at least two classes first, in Draw or Photos." : "None of these weights takes inner steps.");
      return;
    }
    this.pairControls();
    document.getElementById("see").classList.add("waiting");
    for (const line of this.lines) line.ask(true);
  }

  question(address, extra) {
    return { address, weights: [...new Set(this.weights)], samples: this.samples, steps: this.steps, classes: this.current.classes, ...extra };
  }

  problem(problem) {
    document.getElementById("see").classList.remove("waiting");
    showError(problem.message);
  }

  titled(name, ...children) { return make("div", {}, make("h4", {}, this.find(name).method), ...children); }

  showProbabilities({ answers }) {
    showError("");
    document.getElementById("see").classList.remove("waiting");
    const columns = answers.map((answer, i) => {
      const box = make("div");
      new Bars(box, { speak: i === answers.length - 1 }).show(this.current.used, answer.probabilities[0] ?? null, "Nothing new is drawn yet: do so in the other tab.");
      return this.titled(answer.weights, box);
    });
    document.getElementById("see-probabilities").replaceChildren(...columns);
    const fresh = answers.filter((a) => !a.known).map((a) => `${this.find(a.weights).method} adapted in ${Math.round(a.adapt_ms)} ms`);
    if (fresh.length) this.onStatus(fresh.join(", "));
  }

  pairControls() {
    const names = this.current.used.map((c, i) => [String(i), c.name]);
    const box = document.getElementById("see-pair");
    const pick = (which) => choice(which ? "and" : "Between", names, String(this.pair[which]), (value) => {
      const before = [...this.pair];
      this.pair[which] = Number(value);
      if (this.pair[0] === this.pair[1]) this.pair[1 - which] = before[which];
      this.pairControls();
      this.lines[1].ask(true);
    });
    box.replaceChildren(pick(0), pick(1));
  }

  showBoundary({ panels }) {
    const plots = panels.map((panel) => {
      const count = `${panel.right} of ${panel.tested} test images right`;
      return this.titled(panel.weights, this.plot(panel.points, count), make("p", { class: "note" }, count));
    });
    document.getElementById("see-boundary").replaceChildren(...plots);
    const mark = (kind, text) => make("li", {}, svg("svg", { viewBox: "-10 -10 20 20", "aria-hidden": "true", class: "plot-mark" }, shape(kind, 0, 0, 0)), text);
    const marks = [mark("support", "example"), mark("query", this.others().length ? "by other hands" : "moved copies"), mark("perturbed", "perturbed example")];
    if (this.current.query) marks.push(mark("mine", "your new one"));
    for (const item of marks) { colour(item, this.current.used[this.pair[0]].number); }
    document.getElementById("see-legend").replaceChildren(...marks);
  }

  plot(points, text) {
    const [one, other] = this.pair.map((i) => this.current.used[i]);
    const reach = 1.12 * Math.max(...points.map((p) => Math.abs(p.x)), 1e-6);
    const ys = points.map((p) => p.y), low = Math.min(...ys), high = Math.max(...ys);
    const x = (v) => WIDTH / 2 + (v / reach) * (WIDTH / 2 - 8);
    const y = (v) => HEIGHT - 26 - ((v - low) / Math.max(high - low, 1e-9)) * (HEIGHT - 60);
    const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", role: "img", "aria-label": `Decision boundary between ${one.name} and ${other.name}: ${text}` });
    const sides = [svg("rect", { class: "side", x: WIDTH / 2, y: 0, width: WIDTH / 2, height: HEIGHT }), svg("rect", { class: "side", x: 0, y: 0, width: WIDTH / 2, height: HEIGHT })];
    colour(sides[0], one.number);
    colour(sides[1], other.number);
    plot.append(...sides, svg("line", { class: "axis", x1: WIDTH / 2, x2: WIDTH / 2, y1: 0, y2: HEIGHT }));
    plot.append(svg("text", { x: WIDTH - 10, y: 18, "text-anchor": "end" }, `${one.name} ●`), svg("text", { x: 10, y: 18 }, `▲ ${other.name}`));
    const order = ["query", "perturbed", "support", "mine"];
    for (const point of [...points].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind))) {
      const drawn = shape(point.kind, x(point.x), y(point.y), point.class);
      colour(drawn, [one, other][point.class].number);
      plot.append(drawn);
    }
    return plot;
  }

  showMultipliers({ models }) {
    const labels = this.labels(), images = this.current.classes.flat(), box = document.getElementById("see-multipliers");
    const parts = models.map((model) => {
      if (model.reason) return this.titled(model.weights, make("p", { class: "note" }, "Multiplies nothing: there is no noise to learn."));
      const head = make("tr", {}, make("th", { scope: "col" }, "example"), ...model.layers.map((l) =>
        make("th", { scope: "col" }, `layer ${l.layer}`, make("br"), `×${l.low.toFixed(2)} to ×${l.high.toFixed(2)}`)));
      const rows = model.layers[0].maps[0].map((_, i) => make("tr", {},
        make("th", { scope: "row" }, paintImage(images[i], this.shape, `Example of ${labels[i].name}`)),
        ...model.layers.map((l) => make("td", {}, paintMap(l.maps[0][i], "viridis", `Multiplier of layer ${l.layer} over the example of ${labels[i].name}`)))));
      return this.titled(model.weights, make("div", { class: "maps", tabindex: 0, role: "region", "aria-label": "Multipliers by layer" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    });
    box.replaceChildren(...parts);
    this.imageControls(images, labels);
  }

  imageControls(images, labels) {
    const names = images.map((_, i) => [String(i), `${labels[i].name}, example ${1 + labels.slice(0, i).filter((l) => l === labels[i]).length}`]);
    document.getElementById("see-image").replaceChildren(choice("Example", names, String(this.image), (value) => { this.image = Number(value); this.lines[3].ask(true); }));
  }

  showFeatures({ models }) {
    const parts = models.map((model) => {
      if (model.reason) return this.titled(model.weights, make("p", { class: "note" }, "Draws no noise: every pass sees the same features."));
      const titles = ["no noise", ...Array.from({ length: model.samples }, (_, i) => `sample ${i + 1}`), "deviation"];
      const rows = model.layers.flatMap((layer) => layer.channels.map(({ channel, maps }) => make("tr", {},
        make("th", { scope: "row" }, `layer ${layer.layer}`, make("br"), `channel ${channel}`),
        ...maps.map((map, i) => make("td", {}, paintMap(map, "magma", `Layer ${layer.layer}, channel ${channel}, ${titles[i]}`))))));
      const head = make("tr", {}, make("td"), ...titles.map((t) => make("th", { scope: "col" }, t)));
      return this.titled(model.weights, make("div", { class: "maps", tabindex: 0, role: "region", "aria-label": "Features by layer" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    });
    document.getElementById("see-features").replaceChildren(...parts);
  }
}

function shape(kind, x, y, side) {
  if (kind === "mine") {
    const points = Array.from({ length: 10 }, (_, i) => {
      const r = i % 2 ? 4 : 9.5, a = (Math.PI * i) / 5 - Math.PI / 2;
      return `${x + r * Math.cos(a)},${y + r * Math.sin(a)}`;
    });
    return svg("polygon", { class: kind, points: points.join(" ") });
  }
  const r = { support: 8, query: 4.5, perturbed: 4 }[kind];
  if (side === 0) return svg("circle", { class: kind, cx: x, cy: y, r });
  return svg("polygon", { class: kind, points: `${x},${y - r * 1.2} ${x + r * 1.1},${y + r * 0.8} ${x - r * 1.1},${y + r * 0.8}` });
}
