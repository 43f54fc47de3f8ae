"use strict";

// Tables: a click on a heading sorts by it, a second one turns the order round. What has no value stays at the end.
function sortBy(heading) {
  const table = heading.closest("table");
  const column = [...heading.parentNode.children].indexOf(heading);
  const descending = heading.getAttribute("aria-sort") === "ascending";
  const isNumber = heading.dataset.sort === "number";
  const value = (row) => row.children[column]?.dataset.value ?? "";
  const compare = (a, b) => (isNumber ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
  const rows = [...table.tBodies[0].rows];
  rows.sort((first, second) => {
    const a = value(first);
    const b = value(second);
    if (a === "" || b === "") return (a === "") - (b === "");
    return descending ? compare(b, a) : compare(a, b);
  });
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

for (const button of document.querySelectorAll("table.sortable thead button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

// Pictures: a copy is shown in a dialog, with its words and legend; Escape, the button and a click beside it close it.
const dialog = document.getElementById("enlarged");
for (const button of document.querySelectorAll("button.enlarge")) {
  button.addEventListener("click", () => {
    const figure = button.closest("figure");
    const legend = figure.parentNode.nextElementSibling;
    const parts = [button.firstElementChild, figure.querySelector("figcaption")];
    if (legend?.matches(".legend")) parts.push(legend);
    document.getElementById("stage").replaceChildren(...parts.map((part) => part.cloneNode(true)));
    dialog.showModal();
  });
}
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});

// Paper has no details to open.
let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const details of closed) details.open = true;
});
window.addEventListener("afterprint", () => {
  for (const details of closed) details.open = false;
});
