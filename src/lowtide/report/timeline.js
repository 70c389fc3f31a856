// The drawing of one timeline: a stack by category over the events of a step, phases below it, the peak marked and named.

// An event has a place on the axis: its own number, except that short phases are widened (see phase_axis in Python). The view,
// the zoom and the pointer work with places; only ticks and words speak of events.

const MIN_EVENTS = 4; // closer than that there is nothing left to see

class Timeline {
  constructor(figure, data, id) {
    this.data = data;
    this.id = id;
    const [positions, places] = data.axis;
    this.place = (x) => interpolate(x, positions, places);
    this.eventAt = (place) => interpolate(place, places, positions);
    this.widened = places.some((place, index) => place !== positions[index]);
    this.x = runningSum(data.x);
    this.at = this.x.map(this.place);
    this.levels = [];
    for (const column of data.stack) {
      const below = this.levels.at(-1);
      this.levels.push(runningSum(column).map((value, index) => value + (below ? below[index] : 0)));
    }
    this.total = this.levels.at(-1);
    this.reserved = runningSum(data.reserved);
    this.observed = data.observed && { at: data.observed.x.map(this.place), total: runningSum(data.observed.bytes) };
    this.end = Math.max(data.numEvents, 1);
    this.view = [0, this.end];
    this.cursor = null;
    this.brush = null;
    // What the allocator may hold is the card less its context, so that is where the line belongs.
    const capacity = data.capacity - data.context;
    let top = 0;
    for (const values of [this.total, this.reserved, this.observed?.total ?? []]) for (const value of values) top = Math.max(top, value);
    this.capacity = data.capacity > 0 && capacity <= 1.6 * top ? capacity : null;
    this.top = 1.04 * Math.max(top, this.capacity ?? 0, 1);
    this.build(figure);
    new ResizeObserver(() => this.draw()).observe(this.chart);
    this.draw();
  }

  build(figure) {
    const legend = element("ul", { class: "legend" });
    const entry = (kind, name) => legend.append(element("li", {}, element("i", { class: `swatch ${kind}` }), name));
    this.data.categories.forEach((name) => entry(name, name));
    entry("line reserved", "reserved");
    if (this.observed) entry("line observed", "observed");
    if (this.capacity !== null) entry("line capacity", "card less context");
    this.buttons = {};
    const buttons = element("div", { class: "buttons", role: "group", "aria-label": "Zoom" });
    for (const [key, label, text] of [["in", "Zoom in", "+"], ["out", "Zoom out", "\u2212"], ["peak", "Zoom to the peak", "Peak"], ["reset", "Show the whole step", "Reset"]]) {
      buttons.append(this.buttons[key] = element("button", { type: "button", "aria-label": label, title: label }, text));
    }
    const peak = this.data.peak;
    const label = `Memory of ${this.data.name} over ${formatCount(this.data.numEvents)} events, highest at ${formatBytes(peak.bytes)}`
      + `${peak.phase ? ` in ${peak.phase}, at ${peak.place}` : " before the step"}. Arrow keys move through the step, plus and minus zoom, P goes to the peak, 0 shows all.`;
    this.chart = element("div", { class: "chart", tabindex: "0", role: "application", "aria-label": label });
    this.svg = shape("svg", { "aria-hidden": "true" });
    this.overview = shape("svg", { class: "overview", "aria-hidden": "true", height: 36 });
    this.readout = element("div", { class: "readout", hidden: "" });
    this.spoken = element("p", { class: "spoken", "aria-live": "polite" });
    this.hint = element("p", { class: "hint desktop" });
    this.hint.innerHTML = (this.widened ? "Short phases are drawn wider than their share of events. " : "") + "Drag across to zoom, or click and use the wheel. Keys: <kbd>\u2190</kbd> <kbd>\u2192</kbd> move, <kbd>+</kbd> <kbd>\u2212</kbd> zoom, <kbd>P</kbd> peak, <kbd>0</kbd> all.";
    this.chart.append(this.svg, this.overview, this.readout);
    figure.append(element("div", { class: "tools" }, legend, buttons), this.chart, this.hint, this.spoken);
  }

  // Geometry: one place says where the plot lies, and everything else asks it.
  measure() {
    const width = Math.max(this.chart.clientWidth, 240), narrow = width < 560;
    const left = narrow ? 50 : 60, right = 8, top = 50, bottom = 46, height = narrow ? 340 : 430;
    this.box = { width, height, left, top, right: width - right, bottom: height - bottom, narrow };
  }

  px(place) { return this.box.left + (place - this.view[0]) / (this.view[1] - this.view[0]) * (this.box.right - this.box.left); }
  py(bytes) { return this.box.bottom - bytes / this.top * (this.box.bottom - this.box.top); }
  atPixel(px) { return this.view[0] + (px - this.box.left) / (this.box.right - this.box.left) * (this.view[1] - this.view[0]); }

  setView(from, to) {
    const span = clamp(to - from, this.leastSpan((from + to) / 2), this.end);
    const start = clamp((from + to - span) / 2, 0, this.end - span);
    this.view = [start, start + span];
    this.draw();
  }

  leastSpan(place) {
    const event = clamp(this.eventAt(place), MIN_EVENTS / 2, Math.max(this.end - MIN_EVENTS / 2, MIN_EVENTS / 2));
    return Math.min(this.place(event + MIN_EVENTS / 2) - this.place(event - MIN_EVENTS / 2), this.end);
  }

  zoom(factor, about) {
    const [from, to] = this.view, span = clamp((to - from) * factor, this.leastSpan(about), this.end), share = (about - from) / (to - from);
    this.setView(about - span * share, about + span * (1 - share));
  }

  whole() { return this.view[1] - this.view[0] >= this.end; }

  draw() {
    this.measure();
    const { width, height, left, right, top, bottom } = this.box;
    [this.chart.dataset.from, this.chart.dataset.to] = this.view.map(this.eventAt);
    const clip = `clip-${this.id}`, clipPath = shape("clipPath", { id: clip });
    clipPath.append(shape("rect", { x: left, y: top, width: right - left, height: bottom - top }));
    this.plot = shape("g", { "clip-path": `url(#${clip})` });
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(clipPath, this.plot);
    this.drawPhases();
    this.drawAxes();
    this.drawCurves();
    this.drawPeak();
    this.overlay = shape("g");
    this.svg.append(this.overlay, shape("rect", { class: "plot", x: left, y: top, width: right - left, height: bottom - top }));
    this.drawOverlay();
    this.drawOverview();
    this.buttons.reset.disabled = this.buttons.out.disabled = this.whole();
    this.buttons.in.disabled = this.view[1] - this.view[0] <= 1.001 * this.leastSpan((this.view[0] + this.view[1]) / 2);
  }

  drawPhases() {
    const { left, right, top, bottom } = this.box;
    this.data.runs.forEach(([phase, first, last], index) => {
      const from = Math.max(this.px(this.place(index ? first - 0.5 : 0)), left);
      const to = Math.min(this.px(index === this.data.runs.length - 1 ? this.end : this.place(last + 0.5)), right);
      if (to <= from) return;
      if (index % 2) this.plot.append(shape("rect", { class: "band", x: from, y: top, width: to - from, height: bottom - top }));
      this.svg.append(shape("rect", { class: index % 2 ? "strip odd" : "strip", x: from, y: bottom, width: to - from, height: 20, "data-phase": phase }));
      const name = shape("text", { x: (from + to) / 2, y: bottom + 14, "text-anchor": "middle" }, phase);
      this.svg.append(name);
      if (name.getComputedTextLength() > to - from - 4) name.remove();
    });
  }

  drawAxes() {
    const { left, right, bottom, height, narrow } = this.box;
    for (const [bytes, label] of byteTicks(this.top, 6)) {
      const y = Math.round(this.py(bytes)) + 0.5;
      this.plot.append(shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      this.svg.append(shape("text", { class: "tick-y", x: left - 8, y: y + 4, "text-anchor": "end" }, label));
    }
    this.svg.append(shape("text", { x: left - 8, y: bottom + 37, "text-anchor": "end" }, "event"));
    let free = left - 4;
    for (const event of eventTicks(...this.view.map(this.eventAt), narrow ? 5 : 12)) {
      const x = this.px(this.place(event)), text = shape("text", { class: "tick-x", x, y: bottom + 37, "text-anchor": "middle" }, formatCount(event));
      this.svg.append(text);
      const half = text.getComputedTextLength() / 2, middle = clamp(x, left + half - 2, right - half);
      text.setAttribute("x", middle);
      if (middle - half < free) { text.remove(); continue; }
      free = middle + half + 12;
      this.svg.append(shape("line", { class: "grid", x1: x, x2: x, y1: bottom + 20, y2: bottom + 25 }));
    }
  }

  // A step line through the points in view: memory stays as it is until the next event.
  steps(places, values) {
    const first = Math.max(lastAtOrBefore(places, this.view[0]), 0), past = Math.min(lastAtOrBefore(places, this.view[1]) + 2, places.length);
    const round = (value) => Math.round(10 * value) / 10, start = round(this.px(places[first]));
    let line = `M${start} ${round(this.py(values[first]))}`;
    for (let index = first + 1; index < past; index++) line += `H${round(this.px(places[index]))}V${round(this.py(values[index]))}`;
    return { line, area: `${line}V${this.box.bottom}H${start}Z` };
  }

  drawCurves() {
    // From the whole stack down, each over the one before: no seams between neighbours.
    for (let index = this.levels.length - 1; index >= 0; index--) {
      const name = this.data.categories[index];
      this.plot.append(shape("path", { d: this.steps(this.at, this.levels[index]).area, style: `fill:var(--${name})`, "data-category": name }));
    }
    this.plot.append(shape("path", { class: "outline", d: this.steps(this.at, this.total).line }));
    this.plot.append(shape("path", { class: "reserved", d: this.steps(this.at, this.reserved).line }));
    if (this.observed) {
      const line = this.steps(this.observed.at, this.observed.total).line;
      this.plot.append(shape("path", { class: "halo", d: line }), shape("path", { class: "observed", d: line }));
    }
    if (this.capacity === null) return;
    const { left, right } = this.box, y = this.py(this.capacity);
    this.plot.append(shape("line", { class: "capacity", x1: left, x2: right, y1: y, y2: y }));
    this.svg.append(shape("text", { class: "capacity-name", x: right - 4, y: y + 15, "text-anchor": "end" }, formatBytes(this.capacity)));
  }

  drawPeak() {
    const { left, right, top } = this.box, peak = this.data.peak, x = this.px(this.place(peak.position)), y = this.py(peak.bytes);
    const inside = x >= left - 0.5 && x <= right + 0.5, arrow = inside ? "" : x < left ? "\u25c2 " : "\u25b8 ";
    const name = shape("text", { class: "peak-name", y: 16, "data-bytes": peak.bytes }, `${arrow}Peak ${formatBytes(peak.bytes)}${peak.phase ? ` in ${peak.phase}` : ""}`);
    const place = shape("text", { class: "peak-place", y: 34 }, peak.place);
    this.svg.append(name, place);
    shorten(place, right - left);
    for (const text of [name, place]) {
      // Beside the line where there is room, to its left otherwise, never outside the plot.
      const length = text.getComputedTextLength(), beside = x + 8 + length <= right ? x + 8 : x - 8 - length;
      text.setAttribute("x", clamp(beside, left, Math.max(left, right - length)));
    }
    if (!inside) return;
    const clear = Number(place.getAttribute("x")) < x && x < Number(place.getAttribute("x")) + place.getComputedTextLength();
    this.svg.append(shape("line", { class: "peak-line", x1: x, x2: x, y1: clear ? 40 : 4, y2: Math.max(y, top) }));
    this.svg.append(shape("circle", { class: "peak-dot", cx: x, cy: y, r: 4.5 }));
  }

  // What moves with the pointer is redrawn alone.
  drawOverlay() {
    const { left, right, top, bottom } = this.box;
    this.overlay.replaceChildren();
    if (this.brush) {
      const [from, to] = this.brush.map((px) => clamp(px, left, right)).sort((a, b) => a - b);
      this.overlay.append(shape("rect", { class: "brush", x: from, y: top, width: to - from, height: bottom - top }));
    }
    if (this.cursor === null || this.at[this.cursor] < this.view[0] || this.at[this.cursor] > this.view[1]) return;
    const x = this.px(this.at[this.cursor]);
    this.overlay.append(shape("line", { class: "cursor", x1: x, x2: x, y1: top, y2: bottom }));
    this.overlay.append(shape("circle", { class: "cursor-dot", cx: x, cy: this.py(this.total[this.cursor]), r: 3.5 }));
  }

  drawOverview() {
    const { left, right, width } = this.box, height = 36, span = right - left;
    const px = (place) => left + place / this.end * span, py = (bytes) => height - 2 - bytes / this.top * (height - 6);
    let path = `M${left} ${height - 2}`;
    for (let index = 0; index < this.at.length; index++) path += `H${px(this.at[index]).toFixed(1)}V${py(this.total[index]).toFixed(1)}`;
    this.overview.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const peak = px(this.place(this.data.peak.position)), y = py(this.data.peak.bytes);
    this.overview.replaceChildren(
      shape("rect", { class: "strip", x: left, y: 0, width: span, height }),
      shape("path", { class: "mass", d: `${path}H${right}V${height - 2}Z` }),
      shape("circle", { class: "tip", cx: peak, cy: y, r: 2.5 }),
      shape("rect", { class: "window", x: px(this.view[0]) + 0.75, y: 0.75, width: Math.max(px(this.view[1]) - px(this.view[0]) - 1.5, 3), height: height - 1.5, rx: 2 }),
    );
    this.overview.style.display = this.whole() ? "none" : "";
  }
}

function shorten(text, room) {
  let content = text.textContent;
  while (content.length > 4 && text.getComputedTextLength() > room) {
    content = content.slice(0, -2);
    text.textContent = `${content}\u2026`;
  }
}
