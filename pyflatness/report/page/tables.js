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
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
  let shown = "";
  const filter = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/);
    const [layer, measure] = [form.elements.layer, form.elements.measure?.value ?? ""];
    const of = (row) => !layer?.value || row.cells[layer.dataset.column].textContent === layer.value;
    let count = 0;
    for (const [row, text] of rows) {
      row.hidden = !of(row) || !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    if (measure !== shown) {
      const measures = [...form.elements.measure.options].map((option) => option.value);
      const out = names.map((name) => measure && measures.includes(name) && name !== measure);
      for (const row of table.rows) out.forEach((hidden, column) => (row.cells[column].hidden = Boolean(hidden)));
      shown = measure;
    }
    status.textContent = `${count} of ${rows.length} rows`;
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
