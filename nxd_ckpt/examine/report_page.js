"use strict";
// Sorting, filtering and folding of what is on the page already: without this script all of it is shown.
for (const one of document.querySelectorAll("[data-script]")) one.hidden = false;

for (const button of document.querySelectorAll("[data-shows]")) {
  const rows = document.querySelectorAll("." + button.dataset.shows);
  const show = (open) => { for (const row of rows) row.hidden = !open; button.setAttribute("aria-expanded", open); };
  button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
  show(false);
}

const tree = document.getElementById("tree"), flat = document.querySelector("#flat tbody");
if (tree) {
  const rows = [...tree.querySelectorAll("tbody tr")].map((row, place) => {
    const prefix = document.createElement("span");
    prefix.textContent = row.closest("table").dataset.module ?? "";
    prefix.className = "pre";
    row.cells[0].prepend(prefix);
    return { row, place, home: row.parentNode };
  });
  const folds = [...tree.querySelectorAll("details")], open = new Map(folds.map((one) => [one, one.open]));
  const buttons = [...document.querySelectorAll(".top button")];
  const box = document.getElementById("filter"), count = document.getElementById("count");

  const value = (row, column) => {
    const number = Math.abs(parseFloat(row.cells[column].textContent));
    return Number.isNaN(number) ? -1 : number;
  };
  const sort = (column, order) => {
    const isFlat = order !== undefined, sign = order === "up" ? 1 : -1;
    const sorted = [...rows];
    if (isFlat && column > 0) sorted.sort((a, b) => sign * (value(a.row, column) - value(b.row, column)) || a.place - b.place);
    for (const one of sorted) (isFlat ? flat : one.home).append(one.row);
    tree.hidden = isFlat;
    flat.closest("table").hidden = !isFlat;
  };
  for (const button of buttons) button.addEventListener("click", () => {
    const next = { undefined: "down", down: "up", up: undefined }[button.dataset.order];
    for (const one of buttons) { delete one.dataset.order; one.closest("th").removeAttribute("aria-sort"); }
    const column = button.closest("th").cellIndex;
    if (next !== undefined && column > 0) {
      button.dataset.order = next;
      button.closest("th").setAttribute("aria-sort", next === "up" ? "ascending" : "descending");
    }
    sort(column, column > 0 ? next : undefined);
  });

  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { row } of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    for (const one of folds) {
      one.hidden = ![...one.querySelectorAll("tbody tr")].some((row) => !row.hidden) && words.length > 0;
      one.open = words.length > 0 ? shown < 200 : open.get(one);
    }
    count.textContent = words.length ? `${shown} of ${rows.length} tensors` : "";
  };
  box.addEventListener("input", filter);
}
