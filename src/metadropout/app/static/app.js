// The page: tabs, and what each of them needs from the server.
import { get } from "./api.js";
import { Draw } from "./draw.js";
import { make, showError } from "./dom.js";
import { Photos } from "./photos.js";
import { See } from "./see.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const status = (text) => { document.getElementById("status").textContent = text; };
const opened = {};

function open(tab, focus = false) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  showError("");
  status("");
  opened[tab.getAttribute("aria-controls")]?.();
}

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) open(tabs[(i + move + tabs.length) % tabs.length], true);
  });
});
// A file that misses a card must not replace the page.
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());

try {
  const { weights, limits } = await get("/api/weights");
  const drawings = weights.filter((w) => w.drawings && String(w.shape) === "1,28,28");
  const photos = weights.filter((w) => !w.drawings);
  const sources = {};
  if (drawings.length) {
    sources.Draw = new Draw(drawings, limits, status);
    await sources.Draw.fill(5);
  } else nothing("draw", "None of the weights given is for drawings (28 × 28, such as Omniglot's).");
  if (photos.length) sources.Photos = new Photos(photos, limits, status);
  else nothing("photos", "None of the weights given is for photos. Start with weights trained on colour images: metadropout app --weights FILE.");
  if (Object.keys(sources).length) {
    const see = new See(weights, sources, status);
    opened.see = () => see.open();
  }
  document.body.dataset.ready = "true";
} catch (problem) {
  showError(problem.message);
}

function nothing(id, text) {
  document.getElementById(id).replaceChildren(make("p", { class: "panel" }, text));
}
