// Time a step over device memory: between two points the smaller one's plan holds, so the line goes in stairs.

class Curve {
  constructor(figure, data) {
    this.data = data;
    const legend = element("ul", { class: "legend" });
    for (const [kind, words] of [["chosen", "this plan"], ["replayed", "peak replayed"], ["estimated", "peak estimated"]]) {
      legend.append(element("li", {}, element("i", { class: `key ${kind}` }), words));
    }
    this.chart = element("div", { class: "chart" });
    this.said = element("p", { class: "hint", "aria-live": "polite" }, "Point at a mark to read its plan.");
    figure.append(legend, this.chart, this.said);
    new ResizeObserver(() => this.draw()).observe(this.chart);
    this.draw();
  }

  draw() {
    const width = Math.min(this.chart.clientWidth, 860), height = Math.max(0.42 * width, 280);
    if (width === this.width) return;
    this.width = width;
    const svg = drawing("curve-chart", width, height, "Time of a step against device memory");
    const across = new Axis(this.data.x, 46, width - 16), up = new Axis(this.data.y, height - 48, 28);
    drawAxes(svg, across, up, this.data.names);
    const places = this.data.points.map(([x, y]) => [across.place(x), up.place(y)]), stairs = [];
    places.forEach(([x, y], index) => {
      if (index) stairs.push([x, places[index - 1][1]]);
      stairs.push([x, y]);
    });
    stairs.push([across.to, places.at(-1)[1]]);
    svg.append(shape("polyline", { class: "stairs", points: stairs.join(" ") }));
    this.data.points.forEach(([, , words, isReplayed, isChosen], index) => {
      const [cx, cy] = places[index], kind = isChosen ? "chosen" : isReplayed ? "replayed" : "estimated";
      const group = shape("g", { class: `mark ${kind}`, tabindex: 0, role: "img", "aria-label": words });
      group.append(shape("circle", { class: "target", cx, cy, r: 12 }), shape("circle", { class: "dot", cx, cy, r: isChosen ? 7 : 5 }));
      for (const event of ["pointerenter", "focus"]) group.addEventListener(event, () => { this.said.textContent = words; });
      svg.append(group);
    });
    this.chart.replaceChildren(svg);
  }
}
