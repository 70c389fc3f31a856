// Pointer, wheel, touch and keyboard for a session's chart, and the readout of the span under the pointer.

const GRASP = 2; // pixels around the pointer in which a thin span can be hit

class GanttInput {
  constructor(gantt) {
    this.gantt = gantt;
    this.pick = null; // { row, index }
    this.drag = null;
    this.pointers = new Map();
    const { chart, canvas, buttons } = gantt;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (event) => this.up(event));
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && this.drag === null) this.clear(); });
    canvas.addEventListener("dblclick", () => gantt.setView(0, gantt.end));
    chart.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    chart.addEventListener("keydown", (event) => this.key(event));
    chart.addEventListener("blur", () => this.clear());
    buttons.in.addEventListener("click", () => gantt.zoom(0.5, this.middle()));
    buttons.out.addEventListener("click", () => gantt.zoom(2, this.middle()));
    buttons.step.addEventListener("click", () => gantt.showLastStep());
    buttons.reset.addEventListener("click", () => gantt.setView(0, gantt.end));
    gantt.onDraw = () => this.outline();
  }

  local(event) {
    const { left, top } = this.gantt.canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  middle() { return (this.gantt.view[0] + this.gantt.view[1]) / 2; }

  down(event) {
    const [x, y] = this.local(event);
    this.pointers.set(event.pointerId, x);
    this.gantt.chart.focus({ preventScroll: true });
    if (event.pointerType === "touch") { this.hover(x, y); return; }
    event.preventDefault();
    if (event.button !== 0) return;
    this.gantt.canvas.setPointerCapture(event.pointerId);
    this.drag = x;
  }

  move(event) {
    const [x, y] = this.local(event), { gantt } = this;
    if (this.pointers.size === 2 && this.pointers.has(event.pointerId)) { this.pinch(event.pointerId, x); return; }
    if (this.drag === null || Math.abs(x - this.drag) <= 4) { gantt.brush.hidden = true; this.hover(x, y); return; }
    this.clear();
    const { left, right, top, bottom } = gantt.box, [from, to] = [this.drag, x].map((px) => clamp(px, left, right)).sort((a, b) => a - b);
    Object.assign(gantt.brush.style, { left: `${from}px`, width: `${to - from}px`, top: `${top}px`, height: `${bottom - top}px` });
    gantt.brush.hidden = false;
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    const { gantt, drag } = this, zooms = !gantt.brush.hidden && event.type === "pointerup";
    this.drag = null;
    gantt.brush.hidden = true;
    if (!zooms) return;
    const { left, right } = gantt.box, [from, to] = [drag, this.local(event)[0]].map((px) => gantt.atPixel(clamp(px, left, right))).sort((a, b) => a - b);
    gantt.setView(from, to);
  }

  // The two fingers stay on the times they touched.
  pinch(id, here) {
    const { gantt } = this, { left, right } = gantt.box, other = [...this.pointers].find(([key]) => key !== id)[1], before = this.pointers.get(id);
    this.pointers.set(id, here);
    if (Math.abs(here - other) < 12 || Math.abs(before - other) < 12) return;
    const held = gantt.atPixel(other), perPixel = (gantt.atPixel(before) - held) / (here - other);
    gantt.setView(held - (other - left) * perPixel, held + (right - other) * perPixel);
  }

  wheel(event) {
    const { gantt } = this;
    // A page that scrolls must not be caught by a chart it scrolls past: the wheel zooms once the chart has been clicked.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== gantt.chart) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1, [x, y] = this.local(event), { left, right } = gantt.box;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = event.deltaX * unit / (right - left) * (gantt.view[1] - gantt.view[0]);
      gantt.setView(gantt.view[0] + shift, gantt.view[1] + shift);
    } else gantt.zoom(Math.exp(clamp(event.deltaY * unit, -200, 200) / 300), gantt.atPixel(clamp(x, left, right)));
    this.hover(x, y);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { gantt } = this, actions = {
      ArrowRight: () => this.walk(1, 0), ArrowLeft: () => this.walk(-1, 0), ArrowDown: () => this.walk(0, 1), ArrowUp: () => this.walk(0, -1),
      "+": () => gantt.zoom(0.5, this.middle()), "=": () => gantt.zoom(0.5, this.middle()), "-": () => gantt.zoom(2, this.middle()),
      0: () => gantt.setView(0, gantt.end), Escape: () => { gantt.setView(0, gantt.end); this.clear(); },
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // Along a row to the next span, or to the nearest span of the next row that has any.
  walk(along, across) {
    const { gantt } = this, { rows } = gantt;
    let { row, index } = this.pick ?? { row: rows.find((row) => row.isLane && row.from.length), index: -1 };
    if (!row) return;
    if (along) index = clamp(index + along, 0, row.from.length - 1);
    else {
      const time = (Math.max(row.from[Math.max(index, 0)], gantt.view[0]) + Math.min(row.to[Math.max(index, 0)], gantt.view[1])) / 2;
      let next = rows.indexOf(row) + across;
      while (rows[next] && !rows[next].from.length) next += across;
      if (!rows[next]) return;
      row = rows[next];
      index = Math.max(lastAtOrBefore(row.from, time), 0);
    }
    const [from, to] = gantt.view, middle = (row.from[index] + row.to[index]) / 2;
    if (row.to[index] < from || row.from[index] > to) gantt.setView(middle - (to - from) / 2, middle + (to - from) / 2);
    this.select(row, index, gantt.px(clamp(middle, ...gantt.view)));
    const { name } = row.describe(index);
    gantt.spoken.textContent = `${row.isLane ? row.label : "chunk"} ${name}, ${row.kind[index]}: from ${formatMicroseconds(row.from[index])} for ${formatMicroseconds(row.to[index] - row.from[index])}`;
  }

  hover(x, y) {
    const { gantt } = this, { left, right, top, bottom } = gantt.box;
    if (x < left - GRASP || x > right + GRASP || y < top || y > bottom) { this.clear(); return; }
    this.point(x);
    const row = gantt.rows.find((row) => y >= row.top && y < row.top + row.height);
    const index = row ? row.find(gantt.atPixel(x - GRASP), gantt.atPixel(x + GRASP)) : null;
    if (index === null) { this.pick = null; this.outline(); gantt.readout.hidden = true; } else this.select(row, index, x);
  }

  point(x) {
    const { gantt } = this, { left, right, top, height } = gantt.box, tag = gantt.cursor.firstChild, at = clamp(x, left, right);
    Object.assign(gantt.cursor.style, { left: `${at}px`, top: `${top}px`, height: `${height - top - 2}px` });
    tag.textContent = formatMicroseconds(gantt.atPixel(at));
    gantt.cursor.hidden = false;
    // To the other side where it would leave the chart.
    Object.assign(tag.style, at + tag.offsetWidth > right ? { left: "auto", right: "0" } : { left: "0", right: "auto" });
  }

  clear() {
    const { gantt } = this;
    this.pick = null;
    gantt.cursor.hidden = gantt.readout.hidden = gantt.picked.hidden = true;
  }

  select(row, index, x) {
    const { gantt } = this, { readout, box } = gantt;
    this.pick = { row, index };
    this.outline();
    this.fill(row, index);
    readout.hidden = false;
    const offset = gantt.chart.offsetTop, wide = readout.offsetWidth, beside = x + 16 + wide <= box.width ? x + 16 : Math.max(x - 16 - wide, 0);
    readout.style.left = `${beside}px`;
    // Clear of the lanes, which are read together: below the row where there is room, above the lanes otherwise.
    const below = row.top + row.height + 12, high = readout.offsetHeight, above = row.isLane ? box.lanes : row.top;
    readout.style.top = `${offset + (!row.isLane && below + high <= box.lanes ? below : Math.max(above - high - 12, 0))}px`;
  }

  outline() {
    const { gantt, pick } = this, { left, right } = gantt.box;
    gantt.picked.hidden = true;
    if (!pick) return;
    const { row, index } = pick, from = Math.max(gantt.px(row.from[index]), left), to = Math.min(gantt.px(row.to[index]), right);
    if (to < left || from > right) return;
    const inset = row.isLane ? 2 : -1;
    Object.assign(gantt.picked.style, { left: `${from - 2}px`, width: `${Math.max(to - from, 1) + 3}px`, top: `${row.top + inset}px`, height: `${row.height - 2 * inset}px` });
    gantt.picked.hidden = false;
  }

  fill(row, index) {
    const { readout } = this.gantt, { name, bytes, facts } = row.describe(index), kind = row.kind[index], took = row.to[index] - row.from[index], rows = element("dl");
    const add = (key, value) => rows.append(element("dt", {}, key), element("dd", { "data-name": key }, value));
    add("took", formatMicroseconds(took));
    add("from", formatMicroseconds(row.from[index]));
    if (bytes) add("bytes", formatBytes(bytes));
    if (bytes && row.isLane && row.label.startsWith("to ") && took) add("rate", `${formatBytes(bytes / took * 1e6)}/s`);
    for (const [key, value] of facts) add(key, value);
    readout.replaceChildren(
      element("h4", { "data-kind": kind }, name, element("small", {}, element("i", { class: "swatch", style: `background:var(--${this.gantt.slug(kind)})` }), kind)),
      rows,
    );
  }
}
