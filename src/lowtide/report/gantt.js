// The chart of a session: chunks on the device above, one lane for each stream below, on one time axis. A canvas, because
// tens of thousands of spans as elements would freeze the page.

const GANTT = { steps: 20, curve: 46, gap: 12, lane: 26, axis: 26, least: 20 };
const STATES = ["resident", "fetching", "fetched", "in use"];
const KINDS = ["forward", "backward", "update", "waiting", "fetch weights", "upload", "gradients", "write back", "offload", "bring back", "page in", "page out"];

class Gantt {
  constructor(figure, data) {
    this.data = data;
    this.rows = ganttRows(data);
    this.chunkRows = this.rows.filter((row) => !row.isLane);
    this.end = Math.max(data.end, 0.1);
    this.view = [0, this.end];
    this.curveTop = data.curve.reduce((top, [, bytes]) => Math.max(top, bytes), 0);
    this.curveTimes = data.curve.map(([time]) => time);
    this.slugs = new Map();
    this.build(figure);
    new ResizeObserver(() => this.draw()).observe(this.chart);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.draw();
  }

  slug(kind) {
    if (!this.slugs.has(kind)) {
      const known = STATES.includes(kind) || KINDS.includes(kind);
      const others = [...this.slugs.values()].filter((slug) => slug.startsWith("kind-other")).length;
      this.slugs.set(kind, known ? `kind-${kind.replaceAll(" ", "-")}` : `kind-other-${others % 4}`);
    }
    return this.slugs.get(kind);
  }

  build(figure) {
    const legends = element("div", { class: "legends" });
    const legend = (title, rows, order) => {
      const present = new Set(rows.flatMap((row) => [...new Set(row.kind)])), list = element("ul", { class: "legend" }, element("li", {}, title));
      const kinds = [...order.filter((kind) => present.has(kind)), ...[...present].filter((kind) => !order.includes(kind))];
      for (const kind of kinds) list.append(element("li", { "data-kind": kind }, element("i", { class: "swatch", style: `background:var(--${this.slug(kind)})` }), kind));
      if (kinds.length) legends.append(list);
    };
    legend("Chunks", this.chunkRows, STATES);
    legend("Lanes", this.rows.filter((row) => row.isLane), KINDS);
    this.buttons = {};
    const buttons = element("div", { class: "buttons", role: "group", "aria-label": "Zoom" });
    const entries = [["in", "Zoom in", "+"], ["out", "Zoom out", "\u2212"], ["step", "Show the last step", "Last step"], ["reset", "Show all recorded steps", "All"]];
    for (const [key, label, text] of entries) buttons.append(this.buttons[key] = element("button", { type: "button", "aria-label": label, title: label }, text));
    const { steps, numSteps } = this.data, first = steps[0]?.[0], last = steps.at(-1)?.[0];
    const which = steps.length > 1 ? `steps ${first} to ${last}` : steps.length ? `step ${first}` : "the session";
    const chunks = this.chunkRows.length ? `${this.chunkRows.length} chunks and ` : "";
    const label = `${chunks}${this.rows.length - this.chunkRows.length} lanes over ${formatMicroseconds(this.end)}, ${which}. Arrow keys walk through the spans, plus and minus zoom, 0 shows all.`;
    this.chart = element("div", { class: "chart", tabindex: "0", role: "application", "aria-label": label });
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.cursor = element("div", { class: "cursor", hidden: "" }, element("span"));
    this.brush = element("div", { class: "brush", hidden: "" });
    this.picked = element("div", { class: "picked", hidden: "" });
    this.readout = element("div", { class: "readout", hidden: "" });
    this.spoken = element("p", { class: "spoken", "aria-live": "polite" });
    this.hint = element("p", { class: "hint" });
    const shown = steps.length < numSteps ? `The last ${steps.length} of ${formatCount(numSteps)} recorded steps. ` : "";
    const emulated = this.data.isEmulated ? "Emulated device: the times are those of this machine\u2019s processor, not of a GPU. " : "";
    this.hint.append(`${shown}${emulated}`, element("span", { class: "desktop" }, "Drag across to zoom, or click and use the wheel; arrow keys walk from span to span."));
    this.chart.append(this.canvas, this.cursor, this.brush, this.picked);
    figure.append(element("div", { class: "tools" }, legends, buttons), this.chart, this.readout, this.hint, this.spoken);
  }

  // Geometry: one place says where everything lies.
  measure() {
    const width = Math.max(this.chart.clientWidth, 240), narrow = width < 560, count = this.chunkRows.length;
    this.context = this.canvas.getContext("2d");
    this.context.font = this.font(12);
    const most = narrow ? 84 : 190, labels = [...new Set(this.rows.map((row) => row.label)), "on device"];
    const left = Math.min(Math.ceil(labels.reduce((wide, label) => Math.max(wide, this.context.measureText(label).width), 0)) + 14, most);
    const rowHeight = count ? clamp(Math.floor(420 / count), count > 400 ? 1 : 2, 15) : 0;
    let y = GANTT.steps;
    const curve = this.curveTop ? [y, y += GANTT.curve] : null;
    if (curve) y += GANTT.gap;
    this.rows.forEach((row, index) => {
      if (row.isLane && !this.rows[index - 1]?.isLane) y += index ? GANTT.gap : 0;
      row.top = y;
      row.height = row.isLane ? GANTT.lane : rowHeight;
      y += row.height;
    });
    this.box = { width, left, right: width - 10, top: GANTT.steps, bottom: y, height: y + GANTT.axis, lanes: this.rows.find((row) => row.isLane)?.top ?? y, curve, narrow };
  }

  font(size, weight = 400) { return `${weight} ${size}px ${this.style("--sans") || "sans-serif"}`; }
  style(name) { return this.computed.getPropertyValue(name).trim(); }
  px(time) { return this.box.left + (time - this.view[0]) / (this.view[1] - this.view[0]) * (this.box.right - this.box.left); }
  atPixel(px) { return this.view[0] + (px - this.box.left) / (this.box.right - this.box.left) * (this.view[1] - this.view[0]); }
  whole() { return this.view[1] - this.view[0] >= this.end; }

  setView(from, to) {
    const span = clamp(to - from, Math.min(GANTT.least, this.end), this.end), start = clamp((from + to - span) / 2, 0, this.end - span);
    this.view = [start, start + span];
    this.draw();
  }

  zoom(factor, about) {
    const [from, to] = this.view, span = clamp((to - from) * factor, Math.min(GANTT.least, this.end), this.end), share = (about - from) / (to - from);
    this.setView(about - span * share, about + span * (1 - share));
  }

  showLastStep() { this.setView(this.data.steps.at(-1)?.[1] ?? 0, this.end); }

  draw() {
    this.computed = getComputedStyle(this.chart);
    this.measure();
    const { width, height } = this.box, scale = devicePixelRatio || 1, paint = this.context;
    [this.chart.dataset.from, this.chart.dataset.to] = this.view;
    Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    paint.scale(scale, scale);
    paint.textBaseline = "middle";
    this.labels = []; // boxes of all texts, so that tests can see that none lies on another
    this.paints = new Map();
    this.drawBands();
    this.drawAxis();
    this.drawCurve();
    for (const row of this.rows) this.drawSpans(row);
    this.drawSteps();
    this.buttons.reset.disabled = this.buttons.out.disabled = this.whole();
    this.buttons.in.disabled = this.view[1] - this.view[0] <= 1.001 * Math.min(GANTT.least, this.end);
    this.buttons.step.disabled = this.data.steps.length < 2 && this.whole();
    this.onDraw?.();
  }

  text(words, x, y, { align = "left", colour = "--quiet", size = 12, weight = 400, place = "" } = {}) {
    const paint = this.context;
    paint.font = this.font(size, weight);
    paint.textAlign = align;
    paint.fillStyle = colour.startsWith("--") ? this.style(colour) : colour;
    paint.fillText(words, x, y);
    const wide = paint.measureText(words).width, left = align === "right" ? x - wide : align === "center" ? x - wide / 2 : x;
    this.labels.push({ words, place, left, right: left + wide, top: y - size / 2, bottom: y + size / 2 });
  }

  // A name keeps its end, where the number of the block is.
  fit(words, room) {
    const paint = this.context;
    if (paint.measureText(words).width <= room) return words;
    for (let cut = 1; cut < words.length; cut++) if (paint.measureText(`\u2026${words.slice(cut)}`).width <= room) return `\u2026${words.slice(cut)}`;
    return "";
  }

  drawBands() {
    const { left, right } = this.box, paint = this.context;
    let free = -Infinity, odd = false;
    for (let first = 0; first < this.rows.length;) {
      const { label, isLane, top } = this.rows[first];
      let past = first + 1;
      while (past < this.rows.length && this.rows[past].label === label && this.rows[past].isLane === isLane) past++;
      const bottom = this.rows[past - 1].top + this.rows[past - 1].height, middle = (top + bottom) / 2;
      // Bands tell neighbouring groups apart; thinner than that they are only noise.
      if (isLane || (odd && bottom - top >= 6)) {
        paint.fillStyle = this.style("--row");
        paint.fillRect(0, top + (isLane ? 1 : 0), right, bottom - top - (isLane ? 2 : 0));
      }
      odd = !odd;
      // Thin rows share their labels: as many are named as there is room for.
      const apart = isLane || bottom - top >= 8 ? 5.75 : 9;
      if (isLane || middle - apart >= free) {
        paint.font = this.font(12);
        this.text(this.fit(label, left - 12), left - 8, middle, { align: "right", colour: isLane ? "--ink" : "--quiet", place: "gutter" });
        free = middle + apart;
      }
      first = past;
    }
  }

  drawAxis() {
    const { left, right, top, bottom, narrow } = this.box, paint = this.context;
    let free = left - 20;
    for (const [time, label] of timeTicks(...this.view, narrow ? 4 : 10)) {
      const x = Math.round(this.px(time)) + 0.5;
      paint.fillStyle = this.style("--line");
      paint.fillRect(x - 0.5, top, 1, bottom - top + 5);
      paint.font = this.font(12);
      const half = paint.measureText(label).width / 2, middle = clamp(x, left + half - 8, right - half + 6);
      if (middle - half < free) continue;
      free = middle + half + 12;
      this.text(label, middle, bottom + 15, { align: "center", place: "axis" });
    }
  }

  drawCurve() {
    if (!this.box.curve) return;
    const { left, right, curve: [top, bottom] } = this.box, paint = this.context, py = (bytes) => bottom - bytes / this.curveTop * (bottom - top - 14);
    const first = Math.max(lastAtOrBefore(this.curveTimes, this.view[0]), 0), past = lastAtOrBefore(this.curveTimes, this.view[1]) + 1;
    let x = Math.max(this.px(this.curveTimes[first]), left);
    paint.beginPath();
    paint.moveTo(x, bottom);
    for (let index = first; index < past; index++) {
      x = clamp(this.px(this.curveTimes[index]), left, right);
      paint.lineTo(x, index === first ? bottom : py(this.data.curve[index - 1][1]));
      paint.lineTo(x, py(this.data.curve[index][1]));
    }
    if (past > first) paint.lineTo(x = past < this.curveTimes.length ? right : x, py(this.data.curve[past - 1][1]));
    paint.lineTo(x, bottom);
    paint.globalAlpha = 0.55;
    paint.fillStyle = this.style("--plain");
    paint.fill();
    paint.globalAlpha = 1;
    this.text("on device", left - 8, (top + 14 + bottom) / 2, { align: "right", colour: "--ink", place: "gutter" });
    this.text(`chunks hold at most ${formatBytes(this.curveTop)}`, left + 2, top + 6, { size: 11, place: "curve" });
  }

  // Colour of a kind and the ink that is readable on it.
  paintOf(kind) {
    if (!this.paints.has(kind)) {
      const fill = this.style(`--${this.slug(kind)}`), [red, green, blue] = [1, 3, 5].map((at) => (parseInt(fill.slice(at, at + 2), 16) / 255) ** 2.2);
      this.paints.set(kind, { fill, ink: 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "#12161c" : "#ffffff" });
    }
    return this.paints.get(kind);
  }

  drawSpans(row) {
    const { left, right } = this.box, paint = this.context, inset = row.isLane ? 4 : row.height >= 5 ? 1 : 0;
    const [first, past] = row.range(...this.view), y = row.top + inset, height = row.height - 2 * inset;
    let pixel = -1, before = "", names = [];
    for (let index = first; index < past; index++) {
      const from = this.px(row.from[index]), to = this.px(row.to[index]), kind = row.kind[index];
      if (to < left || from > right) continue;
      // Time lost is never too thin to be seen. Spans thinner than a pixel, of one kind and in the same pixel, look like one: draw one.
      if (to - from < 1 && Math.floor(from) === pixel && kind === before) continue;
      [pixel, before] = [Math.floor(to), kind];
      const start = Math.max(from, left), wide = Math.max(Math.min(to, right) - start, kind === "waiting" ? 2 : 1), { fill, ink } = this.paintOf(kind);
      paint.fillStyle = fill;
      paint.fillRect(start, y, wide > 4 ? wide - 1 : wide, height);
      // A span around others (the whole model's) is drawn over by them, and so would its name be.
      while (names.length && names.at(-1).stop > start + 1) names.pop();
      if (row.isLane && wide > 22) names.push({ index, start, wide, stop: start + wide, ink });
    }
    for (const { index, start, wide, ink } of names) this.drawName(row, index, start, wide, y + height / 2, ink);
  }

  drawName(row, index, start, wide, middle, ink) {
    const words = row.kind[index] === "waiting" ? `wait for ${row.texts[index]}` : row.texts[index], paint = this.context;
    paint.font = this.font(11);
    // The number of the block, where nothing longer has room.
    const short = [words, words.replace(/^wait for .*$/, "wait"), words.match(/\d+(\/\d+)?$/)?.[0] ?? ""].find((text) => paint.measureText(text).width <= wide - 7);
    if (short) this.text(short, start + (wide - 1) / 2, middle + 0.5, { align: "center", colour: ink, size: 11, place: "bar" });
  }

  drawSteps() {
    const { left, right, bottom } = this.box, { steps } = this.data, paint = this.context;
    steps.forEach(([step, begin], index) => {
      const from = this.px(begin), to = index + 1 < steps.length ? this.px(steps[index + 1][1]) : this.px(this.end);
      if (from >= left && from <= right && index) {
        paint.fillStyle = this.style("--ink");
        paint.globalAlpha = 0.55;
        paint.fillRect(Math.round(from), 2, 1, bottom - 2);
        paint.globalAlpha = 1;
      }
      const start = Math.max(from, left), stop = Math.min(to, right), label = `step ${formatCount(step)}`;
      paint.font = this.font(12, 600);
      if (stop - start > paint.measureText(label).width + 8) this.text(label, start + 5, 9, { colour: "--ink", weight: 600, place: "steps" });
    });
  }
}
