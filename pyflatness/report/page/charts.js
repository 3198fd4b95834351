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
  const style = (of) => getComputedStyle(document.documentElement).getPropertyValue(of).trim();
  const inks = { text: "--text", ground: "--ground", line: "--line", link: "--link" };
  const colours = () => Object.entries(inks).map(([ink, of]) => ({ name: ink, value: style(of) }));
  const [text, ground, line, link] = Object.keys(inks).map((ink) => ({ expr: ink }));
  const views = [];
  const recolour = () => {
    for (const view of views) {
      for (const { name, value } of colours()) view.signal(name, value);
      view.run();
    }
  };
  const onPaper = (on) => {
    document.documentElement.classList.toggle("paper", on);
    recolour();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  const guide = { labelColor: text, titleColor: text };
  const config = {
    background: ground,
    title: { color: text, subtitleColor: text },
    axis: { ...guide, gridColor: line, domainColor: text, tickColor: text },
    legend: guide,
    view: { stroke: line },
    mark: { color: link },
  };
  const actions = { export: true, source: false, compiled: false, editor: false };
  for (const [section, { data, specs }] of sections.entries()) {
    const renderer = data.length > 200 ? "canvas" : "svg";
    const options = { mode: "vega-lite", renderer, config: { ...config, params: colours() }, actions, ast: true, logLevel: 1 }; // errors alone
    const boxes = [...specs.keys()].map((place) => document.getElementById(`chart-${section}-${place}`));
    const begun = new Set();
    const show = async (place) => {
      if (begun.has(place)) return;
      begun.add(place);
      const spec = { ...specs[place], datasets: { ...specs[place].datasets, [name]: structuredClone(data) } };
      views.push((await vegaEmbed(boxes[place], spec, options)).view);
      await new Promise((done) => setTimeout(done));
    };
    if (specs.length > 1) await chooser(boxes, specs, show);
    else for (const place of specs.keys()) await show(place);
  }
  document.documentElement.dataset.drawn = "yes";
})();
