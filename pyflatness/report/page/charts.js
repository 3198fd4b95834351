"use strict";
// Draw the charts one after the other; the page answers meanwhile.
(async () => {
  const { name, sections } = JSON.parse(document.getElementById("data").textContent);
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : undefined;
  const actions = { export: true, source: false, compiled: false, editor: false };
  for (const [section, { data, specs }] of sections.entries()) {
    const renderer = data.length > 200 ? "canvas" : "svg";
    const options = { mode: "vega-lite", renderer, theme, actions, ast: true, logLevel: 1 }; // errors alone
    for (const [place, spec] of specs.entries()) {
      spec.datasets = { [name]: structuredClone(data) };
      await vegaEmbed(`#chart-${section}-${place}`, spec, options);
      await new Promise((done) => setTimeout(done));
    }
  }
  document.documentElement.dataset.drawn = "yes";
})();
