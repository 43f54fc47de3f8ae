// The tab for drawing: cards with examples, a large pad for a new drawing, and what it is taken for.
import { Line, get } from "./api.js";
import { colour, icon, letter, make, showError } from "./dom.js";
import { Pad } from "./pad.js";
import { Bars, adaptControls, paintImage, usualSamples } from "./parts.js";

export class Draw {
  constructor(models, limits, onStatus) {
    Object.assign(this, { models, limits, onStatus });
    this.cards = document.getElementById("draw-cards");
    this.classes = [];
    const preferred = models.find((m) => m.noise && m.adapts) ?? models[0];
    this.state = { weights: preferred.name, samples: null, steps: null };
    this.bars = new Bars(document.getElementById("draw-answer"));
    this.query = new Pad({ label: "New drawing", hint: "Draw one of them here", big: true, onStroke: () => this.asked() });
    this.sees = make("span", { class: "sees" });
    this.another = make("button", { type: "button", onclick: () => this.anotherHand() }, "By another hand");
    const below = make("div", { class: "below" }, this.sees, this.another);
    document.getElementById("draw-query").append(this.query.element, below);
    this.line = new Line("draw", () => this.question(), (answer) => this.answered(answer), (problem) => showError(problem.message));
    document.getElementById("draw-fill").addEventListener("click", () => this.fill(Math.max(2, Math.min(this.limits.classes, this.classes.length || 5))));
    document.getElementById("draw-empty").addEventListener("click", () => this.empty());
    adaptControls(document.getElementById("draw-controls"), models, this.state, () => this.changed());
  }

  get model() { return this.models.find((m) => m.name === this.state.weights); }
  get shown() { return this.classes.filter((c) => c.pads.some((pad) => pad.drawn)); }

  async fill(count) {
    try {
      const { glyphs } = await this.glyphs(count);
      this.classes = [];
      for (const glyph of glyphs) this.addClass(glyph, false);
      this.render();
      this.query.clear();
      this.changed();
    } catch (problem) {
      showError(problem.message);
    }
  }

  glyphs(count, examples = 1) {
    const seed = crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
    return get(`/api/glyphs?classes=${count}&examples=${examples}&seed=${seed}`);
  }

  empty() {
    this.classes = [];
    for (let i = 0; i < 3; i++) this.addClass(null, false);
    this.render();
    this.query.clear();
    this.changed();
  }

  addClass(glyph = null, render = true) {
    if (this.classes.length >= this.limits.classes) return;
    const taken = new Set(this.classes.map((c) => c.number));
    let number = 0;
    while (taken.has(number)) number++;
    const added = { number, name: letter(number), pads: [], others: [] };
    this.classes.push(added);
    this.addPad(added);
    if (glyph) this.useGlyph(added, glyph);
    if (render) {
      this.render();
      added.card.querySelector("canvas").focus();
    }
  }

  useGlyph(one, glyph) {
    one.others = glyph.others;
    one.pads.length = 1;
    one.pads[0].set(glyph.examples[0].strokes, glyph.examples[0].image);
  }

  addPad(one) {
    const pad = new Pad({
      label: `Example ${one.pads.length + 1} of ${one.name}`, hint: "Draw",
      onStroke: (finished) => {
        if (!finished) return;
        if (!pad.given) one.others = [];
        this.changed();
      },
      onRemove: () => {
        if (one.pads.length > 1) one.pads.splice(one.pads.indexOf(pad), 1);
        else return pad.clear();
        this.render();
        this.changed();
      },
    });
    one.pads.push(pad);
  }

  render() {
    this.cards.replaceChildren();
    this.classes.forEach((one) => {
      const name = make("input", { value: one.name, maxlength: 40, "aria-label": `Name of class ${one.number + 1}`, autocomplete: "off", spellcheck: "false" });
      name.addEventListener("input", () => { one.name = name.value.trim() || letter(one.number); this.showAnswer(); });
      const remove = icon("remove", `Remove class ${one.name}`, () => {
        this.classes.splice(this.classes.indexOf(one), 1);
        this.render();
        this.changed();
      });
      remove.disabled = this.classes.length <= 2;
      const more = make("button", { type: "button", onclick: () => {
        this.addPad(one);
        this.render();
        one.pads.at(-1).canvas.focus();
      } }, "+ example");
      more.disabled = one.pads.length >= 5;
      const glyph = make("button", { type: "button", "aria-label": `Put a random unseen character into ${one.name}`, onclick: async () => {
        try {
          this.useGlyph(one, (await this.glyphs(1)).glyphs[0]);
          this.render();
        } catch (problem) { showError(problem.message); }
      } }, "Random");
      one.card = make("article", { class: "card", "aria-label": `Class ${one.name}` },
        make("div", { class: "card-head" }, name, remove),
        make("div", { class: one.pads.length > 1 ? "examples several" : "examples" }, ...one.pads.map((pad) => pad.element)),
        make("div", { class: "card-foot" }, more, glyph));
      colour(one.card, one.number);
      this.cards.append(one.card);
    });
    if (this.classes.length < this.limits.classes) {
      this.cards.append(make("button", { class: "add", type: "button", id: "add-class", onclick: () => this.addClass() }, "+ class"));
    }
    this.showAnswer();
  }

  anotherHand() {
    const known = this.classes.filter((c) => c.others.length);
    if (!known.length) return;
    const one = known[Math.floor(Math.random() * known.length)];
    const hand = one.others[Math.floor(Math.random() * one.others.length)];
    this.query.set(hand.strokes, hand.image);
  }

  // The examples have changed: adapt anew.
  changed() {
    this.another.disabled = !this.classes.some((c) => c.others.length);
    this.answer = null;
    this.line.ask(true);
    this.showAnswer();
    this.onChange?.();
  }

  // Only the new drawing has changed: the adapted model is the same.
  asked() {
    this.sees.replaceChildren();
    if (this.query.drawn) {
      this.sees.append(paintImage(this.query.image(), [1, 28, 28], "The new drawing as the network gets it"), "what it sees");
    }
    if (!this.query.drawn) this.answer = null;
    this.line.ask();
    if (!this.query.drawn) this.showAnswer();
    this.onChange?.();
  }

  task() {
    const used = this.shown;
    const classes = used.map((c) => c.pads.filter((pad) => pad.drawn).map((pad) => pad.image()));
    return { used, classes, query: this.query.image(), others: used.map((c) => c.others.map((hand) => hand.image)) };
  }

  question() {
    const { used, classes, query } = this.task();
    if (used.length < 2) return null;
    const samples = this.state.samples ?? usualSamples(classes.flat().length);
    return { address: "/api/classify", weights: [this.state.weights], samples, steps: this.state.steps, classes, queries: query ? [query] : [] };
  }

  answered(answer, question) {
    showError("");
    const [{ probabilities, adapt_ms, answer_ms, samples, known }] = answer.answers;
    if (!known) this.adapted = `adapted in ${Math.round(adapt_ms)} ms${this.model.noise ? ` (${samples} noise samples)` : ""}`;
    this.answer = this.query.drawn && probabilities[0] ? { used: this.shown, probabilities: probabilities[0] } : null;
    this.onStatus(`${this.adapted ?? "adapted"}${probabilities[0] ? `, answered in ${Math.max(1, Math.round(answer_ms))} ms` : ""}`);
    this.showAnswer();
  }

  showAnswer() {
    const used = this.answer?.used ?? this.shown;
    const hint = this.shown.length < 2 ? "Draw examples of at least two classes." : this.query.drawn ? "…" : "Draw above to see what it is taken for.";
    this.bars.show(used, this.answer?.probabilities ?? null, hint);
    const top = this.answer ? this.answer.probabilities.indexOf(Math.max(...this.answer.probabilities)) : -1;
    for (const one of this.classes) one.card?.classList.toggle("best", used[top] === one);
  }
}
