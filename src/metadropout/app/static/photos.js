// The tab for photos: cards to drop files on, test photos, and what they are taken for.
import { Line, sendPhoto } from "./api.js";
import { announce, colour, icon, letter, make, showError } from "./dom.js";
import { Bars, adaptControls, usualSamples } from "./parts.js";

export class Photos {
  constructor(models, limits, onStatus) {
    Object.assign(this, { models, limits, onStatus });
    this.cards = document.getElementById("photos-cards");
    const preferred = models.find((m) => m.noise && m.adapts) ?? models[0];
    this.state = { weights: preferred.name, samples: null, steps: null };
    this.classes = [];
    this.tests = [];
    for (let i = 0; i < 2; i++) this.addClass(false);
    this.answers = document.getElementById("photos-answers");
    document.getElementById("photos-query").append(this.dropArea("Drop photos to test, or choose", "Choose test photos", (files) => this.addTests(files)));
    this.line = new Line("photos", () => this.question(), (answer) => this.answered(answer), (problem) => showError(problem.message));
    adaptControls(document.getElementById("photos-controls"), models, this.state, (other) => (other ? this.prepareAgain() : this.changed()));
    this.render();
    this.showAnswers();
  }

  get model() { return this.models.find((m) => m.name === this.state.weights); }
  get shown() { return this.classes.filter((c) => c.photos.length); }

  dropArea(text, label, onFiles) {
    const input = make("input", { type: "file", accept: "image/*", multiple: true, class: "hidden", "aria-label": label });
    input.addEventListener("change", () => { onFiles([...input.files]); input.value = ""; });
    const area = make("label", { class: "drop" }, make("span", {}, text), input);
    area.addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("over"); });
    area.addEventListener("dragleave", () => area.classList.remove("over"));
    area.addEventListener("drop", (event) => {
      event.preventDefault();
      area.classList.remove("over");
      onFiles([...event.dataTransfer.files]);
    });
    return area;
  }

  // Sends files to the server, which decodes them safely; gives those that are photos and names the others.
  async prepare(files) {
    const found = [], refused = [];
    for (const file of files) {
      try {
        if (file.size > this.limits.photo_bytes) throw new Error(`larger than ${this.limits.photo_bytes / 2 ** 20} MB`);
        found.push({ file, ...(await sendPhoto(file, this.state.weights)) });
      } catch (problem) {
        refused.push(`${file.name}: ${problem.message}`);
      }
    }
    this.complain(refused.join("; "));
    return found;
  }

  // What was said of files stays until others are chosen: an answer about the photos that are there must not hide it.
  complain(message) {
    this.complaint = message;
    showError(message);
  }

  async prepareAgain() {
    for (const holder of [...this.classes.map((c) => c.photos), this.tests]) {
      holder.splice(0, holder.length, ...(await this.prepare(holder.map((photo) => photo.file))));
    }
    this.changed();
  }

  addClass(render = true) {
    const taken = new Set(this.classes.map((c) => c.number));
    let number = 0;
    while (taken.has(number)) number++;
    this.classes.push({ number, name: `Class ${letter(number)}`, photos: [] });
    if (render) { this.render(); this.changed(); }
  }

  async addPhotos(one, files) {
    const free = Math.min(this.limits.examples - one.photos.length, this.limits.images - this.shown.reduce((n, c) => n + c.photos.length, 0));
    const added = await this.prepare(files.slice(0, Math.max(0, free)));
    one.photos.push(...added);
    if (files.length > free) this.complain(`${files.length - free} photos were left out: ${this.limits.examples} are allowed in a class, ${this.limits.images} in all`);
    announce(`${added.length} photos added to ${one.name}`);
    this.render();
    this.changed();
  }

  async addTests(files) {
    this.tests.unshift(...(await this.prepare(files.slice(0, this.limits.queries))));
    this.tests.length = Math.min(this.tests.length, this.limits.queries);
    this.changed();
  }

  render() {
    this.cards.replaceChildren();
    for (const one of this.classes) {
      const name = make("input", { value: one.name, maxlength: 40, "aria-label": `Name of photo class ${one.number + 1}`, autocomplete: "off", spellcheck: "false" });
      name.addEventListener("input", () => { one.name = name.value.trim() || `Class ${letter(one.number)}`; this.showAnswers(); });
      const remove = icon("remove", `Remove ${one.name}`, () => {
        this.classes.splice(this.classes.indexOf(one), 1);
        this.render();
        this.changed();
      });
      remove.disabled = this.classes.length <= 2;
      const thumbs = one.photos.map((photo, i) => make("div", { class: "thumb" },
        make("img", { src: photo.preview, alt: `Photo ${i + 1} of ${one.name}` }),
        icon("remove", `Remove photo ${i + 1} of ${one.name}`, () => { one.photos.splice(i, 1); this.render(); this.changed(); })));
      const card = make("article", { class: "card", "aria-label": one.name }, make("div", { class: "card-head" }, name, remove));
      if (thumbs.length) card.append(make("div", { class: "thumbs" }, ...thumbs));
      card.append(this.dropArea("Drop photos, or choose", `Choose photos for ${one.name}`, (files) => this.addPhotos(one, files)));
      colour(card, one.number);
      this.cards.append(card);
    }
    if (this.classes.length < this.limits.classes) {
      this.cards.append(make("button", { class: "add", type: "button", onclick: () => this.addClass() }, "+ class"));
    }
  }

  changed() {
    this.answer = null;
    this.line.ask(true);
    this.showAnswers();
    this.onChange?.();
  }

  task() {
    const used = this.shown;
    return { used, classes: used.map((c) => c.photos.map((p) => p.image)), query: this.tests[0]?.image ?? null, others: used.map(() => []) };
  }

  question() {
    const { used, classes } = this.task();
    if (used.length < 2) return null;
    const samples = this.state.samples ?? usualSamples(classes.flat().length);
    return { address: "/api/classify", weights: [this.state.weights], samples, steps: this.state.steps, classes, queries: this.tests.map((t) => t.image) };
  }

  answered({ answers: [answer] }) {
    showError(this.complaint);
    this.answer = { used: this.shown, probabilities: answer.probabilities };
    if (!answer.known) this.onStatus(`adapted in ${Math.round(answer.adapt_ms)} ms`);
    this.showAnswers();
  }

  showAnswers() {
    const hint = this.shown.length < 2 ? "Add photos to at least two classes." : "…";
    const rows = this.tests.map((photo, i) => {
      const bars = make("div");
      new Bars(bars, { speak: i === 0 }).show(this.answer?.used ?? this.shown, this.answer?.probabilities[i] ?? null, hint);
      return make("div", { class: "photo-answer" }, make("img", { src: photo.preview, alt: `Test photo ${i + 1}` }), bars);
    });
    if (!rows.length) rows.push(make("p", { class: "note" }, this.shown.length < 2 ? hint : "Drop a new photo to see what it is taken for."));
    this.answers.replaceChildren(...rows);
  }
}
