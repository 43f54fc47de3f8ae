// Small helpers for building the page; text is never read as HTML.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const PATHS = {
  undo: "M9 14 4 9l5-5M4 9h10a6 6 0 0 1 0 12h-3",
  clear: "M4 7h16M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3",
  remove: "M6 6l12 12M18 6 6 18",
};
export function icon(name, label, action) {
  const picture = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
  return make("button", { class: "icon", type: "button", "aria-label": label, title: label, onclick: action }, picture);
}

// Hues far apart for neighbours, of equal lightness: --class-l is lighter in darkness.
export function colour(element, number) {
  const hue = (255 + number * 137.5) % 360;
  element.style.setProperty("--c", `oklch(var(--class-l) 0.16 ${hue.toFixed(0)})`);
}

let announced = 0;
export function announce(text) {
  clearTimeout(announced);
  announced = setTimeout(() => { document.getElementById("announce").textContent = text; }, 400);
}

export function showError(message) {
  const box = document.getElementById("error");
  box.hidden = !message;
  box.textContent = message || "";
}

export const letter = (number) => String.fromCharCode(65 + number);
export const percent = (p) => (p >= 0.995 ? "100 %" : p < 0.005 ? "0 %" : `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`);
