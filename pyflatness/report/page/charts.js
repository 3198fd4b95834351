"use strict";
// Draw the charts one after the other; the page answers meanwhile. Of the charts of a section a reader chooses one.

function chooser(boxes, specs, show) {
  const [label, select] = [document.createElement("label"), document.createElement("select")];
  select.append(...specs.map((spec, place) => new Option(spec.title.text, place)), new Option("all", "all"));
  label.className = "choice";
  label.append("Chart ", select);
  boxes[0].parentElement.before(label);
  const update = async () => {
    const chosen = [...specs.keys()].filter((place) => select.value === "all" || Number(select.value) === place);
    boxes.forEach((box, place) => (box.hidden = !chosen.includes(place)));
    for (const place of chosen) await show(place);
  };
  select.addEventListener("change", update);
  return update();
}

(async () => {
  const { name, sections } = JSON.parse(document.getElementById("data").textContent);
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : undefined;
  const colour = (of) => getComputedStyle(document.documentElement).getPropertyValue(of).trim();
  const config = {
    background: colour("--ground"),
    axis: { gridColor: colour("--line") },
    view: { stroke: colour("--line") },
    mark: { color: colour("--link") },
  };
  const actions = { export: true, source: false, compiled: false, editor: false };
  for (const [section, { data, specs }] of sections.entries()) {
    const renderer = data.length > 200 ? "canvas" : "svg";
    const options = { mode: "vega-lite", renderer, theme, config, actions, ast: true, logLevel: 1 }; // errors alone
    const boxes = [...specs.keys()].map((place) => document.getElementById(`chart-${section}-${place}`));
    const begun = new Set();
    const show = async (place) => {
      if (begun.has(place)) return;
      begun.add(place);
      const spec = { ...specs[place], datasets: { ...specs[place].datasets, [name]: structuredClone(data) } };
      await vegaEmbed(boxes[place], spec, options);
      await new Promise((done) => setTimeout(done));
    };
    if (specs.length > 1) await chooser(boxes, specs, show);
    else for (const place of specs.keys()) await show(place);
  }
  document.documentElement.dataset.drawn = "yes";
})();
