"use strict"; // Make tables sortable and filterable, which are readable without this script.
const order = new Intl.Collator(undefined, { numeric: true });

function sortable(table, status) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent;
  };
  const rank = (found) => (typeof found === "number" ? 0 : found ? 1 : 2); // empty cells last in either direction
  const compare = (a, b, sign) => rank(a) - rank(b) || sign * (rank(a) ? order.compare(a, b) : a - b);
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
      rows.sort((a, b) => compare(a[0], b[0], up ? 1 : -1));
      table.tBodies[0].append(...rows.map((pair) => pair[1]));
      status.textContent = `sorted by ${button.textContent}, ${up ? "ascending" : "descending"}`;
    });
  });
}

function filterable(form, table, status) {
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  const { words, layer, measure } = form.elements;
  const measures = [...(measure?.options ?? [])].map((option) => option.value);
  const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
  let before = "";
  const several = layer && layer.dataset.column !== "0"; // networks
  if (several && [...layer.options].some((option) => option.value === "network")) layer.value = "network";
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/);
    const of = (row) => !layer?.value || row.cells[layer.dataset.column].textContent === layer.value;
    for (const [row, text] of rows) row.hidden = !of(row) || !wanted.every((word) => text.includes(word));
    const shown = rows.map((pair) => pair[0]).filter((row) => !row.hidden);
    const other = (name) => measure?.value && measures.includes(name) && name !== measure.value;
    const empty = (column) => shown.length && shown.every((row) => !row.cells[column].textContent);
    const out = heads.map((name, column) => Boolean(other(name) || empty(column)));
    if (out.join() !== before) {
      for (const row of table.rows) out.forEach((hidden, column) => (row.cells[column].hidden = hidden));
      before = out.join();
    }
    status.textContent = `${shown.length} of ${rows.length} rows`;
  };
  for (const event of ["input", "change"]) form.addEventListener(event, filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
  form.hidden = false;
}

for (const form of document.querySelectorAll("form.filter")) {
  const [table, status] = [document.getElementById(form.dataset.table), form.querySelector("[role=status]")];
  filterable(form, table, status);
  sortable(table, status);
}

const wide = [...document.querySelectorAll(".wide > table")];
addEventListener("beforeprint", () => {
  for (const table of wide) {
    table.style.width = "min-content";
    table.style.zoom = Math.min(1, 850 / table.offsetWidth); // a page's width, which has smaller letters than a screen
    table.style.width = "";
  }
});
addEventListener("afterprint", () => wide.forEach((table) => (table.style.zoom = "")));
