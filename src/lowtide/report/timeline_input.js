// Pointer, wheel, touch and keyboard for a timeline, and the readout of the event under the cursor.

const NEAR = 2.5; // pixels within which the cursor finds the highest point, so that a spike one event wide can be hit

class TimelineInput {
  constructor(timeline) {
    this.timeline = timeline;
    this.pointers = new Map();
    this.drag = null;
    const { chart, svg, overview, buttons } = timeline;
    svg.addEventListener("pointerdown", (event) => this.down(event));
    svg.addEventListener("pointermove", (event) => this.move(event));
    svg.addEventListener("pointerup", (event) => this.up(event));
    svg.addEventListener("pointercancel", (event) => this.up(event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && !this.drag) this.select(null); });
    svg.addEventListener("dblclick", () => timeline.setView(0, timeline.end));
    chart.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    chart.addEventListener("keydown", (event) => this.key(event));
    chart.addEventListener("blur", () => this.select(null));
    const pan = (event) => {
      if (!event.buttons) return;
      const { left, right } = timeline.box, middle = (this.local(event) - left) / (right - left) * timeline.end, half = (timeline.view[1] - timeline.view[0]) / 2;
      timeline.setView(middle - half, middle + half);
    };
    overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); pan(event); });
    overview.addEventListener("pointermove", pan);
    buttons.in.addEventListener("click", () => timeline.zoom(0.5, this.middle()));
    buttons.out.addEventListener("click", () => timeline.zoom(2, this.middle()));
    buttons.reset.addEventListener("click", () => timeline.setView(0, timeline.end));
    buttons.peak.addEventListener("click", () => this.toPeak());
  }

  local(event) { return event.clientX - this.timeline.chart.getBoundingClientRect().left; }

  middle() {
    const { view, cursor, at } = this.timeline;
    return cursor !== null && at[cursor] >= view[0] && at[cursor] <= view[1] ? at[cursor] : (view[0] + view[1]) / 2;
  }

  down(event) {
    this.pointers.set(event.pointerId, this.local(event));
    // Text stays selectable elsewhere; here a drag means zoom.
    if (event.pointerType !== "touch") event.preventDefault();
    this.timeline.chart.focus({ preventScroll: true });
    if (event.pointerType === "touch") { this.hover(this.local(event)); return; }
    if (event.button !== 0) return;
    this.timeline.svg.setPointerCapture(event.pointerId);
    this.drag = this.local(event);
  }

  move(event) {
    const here = this.local(event), timeline = this.timeline;
    if (this.pointers.size === 2 && this.pointers.has(event.pointerId)) { this.pinch(event.pointerId, here); return; }
    if (this.drag === null) { this.hover(here); return; }
    timeline.brush = Math.abs(here - this.drag) > 4 ? [this.drag, here] : null;
    if (timeline.brush) this.select(null); else this.hover(here);
    timeline.drawOverlay();
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    const { timeline } = this, brush = timeline.brush;
    this.drag = timeline.brush = null;
    if (brush && event.type === "pointerup") {
      const { left, right } = timeline.box;
      const [from, to] = brush.map((px) => timeline.atPixel(clamp(px, left, right))).sort((a, b) => a - b);
      timeline.setView(from, to);
    } else if (brush) timeline.drawOverlay();
  }

  // The two fingers stay on the events they touched.
  pinch(id, here) {
    const { timeline } = this, { left, right } = timeline.box;
    const other = [...this.pointers].find(([key]) => key !== id)[1], before = this.pointers.get(id);
    this.pointers.set(id, here);
    if (Math.abs(here - other) < 12 || Math.abs(before - other) < 12) return;
    const moved = timeline.atPixel(before), held = timeline.atPixel(other), perPixel = (moved - held) / (here - other);
    timeline.setView(held - (other - left) * perPixel, held + (right - other) * perPixel);
  }

  wheel(event) {
    const { timeline } = this;
    // A page that scrolls must not be caught by a chart it scrolls past: the wheel zooms once the chart has been clicked.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== timeline.chart) return;
    event.preventDefault();
    const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : 1), { left, right } = timeline.box;
    timeline.zoom(Math.exp(clamp(pixels, -200, 200) / 300), timeline.atPixel(clamp(this.local(event), left, right)));
    this.hover(this.local(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { timeline } = this, last = timeline.at.length - 1, stride = event.shiftKey ? 25 : 1;
    const from = timeline.cursor ?? Math.max(lastAtOrBefore(timeline.at, timeline.view[0]), 0);
    const actions = {
      ArrowRight: () => this.walk(Math.min(from + stride, last)),
      ArrowLeft: () => this.walk(Math.max(from - stride, 0)),
      Home: () => this.walk(0),
      End: () => this.walk(last),
      "+": () => timeline.zoom(0.5, this.middle()),
      "=": () => timeline.zoom(0.5, this.middle()),
      "-": () => timeline.zoom(2, this.middle()),
      0: () => timeline.setView(0, timeline.end),
      Escape: () => { timeline.setView(0, timeline.end); this.select(null); },
      p: () => this.toPeak(),
      P: () => this.toPeak(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  walk(index) {
    const { timeline } = this, [from, to] = timeline.view, at = timeline.at[index];
    if (at < from || at > to) timeline.setView(at - (to - from) / 2, at + (to - from) / 2);
    this.select(index);
    timeline.spoken.textContent = this.sentence(index);
  }

  toPeak() {
    const { timeline } = this, { position } = timeline.data.peak, place = timeline.place(position), half = timeline.end / 16;
    timeline.setView(place - half, place + half);
    this.walk(lastAtOrBefore(timeline.x, position));
  }

  hover(px) {
    const { timeline } = this, { left, right } = timeline.box;
    if (px < left - NEAR || px > right + NEAR) { this.select(null); return; }
    const index = (distance) => lastAtOrBefore(timeline.at, timeline.atPixel(px + distance));
    const first = index(-NEAR) + 1, past = index(NEAR) + 1;
    let best = Math.max(index(0), 0);
    for (let index = first; index < past; index++) if (index === first || timeline.total[index] > timeline.total[best]) best = index;
    this.select(best);
  }

  select(index) {
    const { timeline } = this, { readout } = timeline;
    timeline.cursor = index;
    timeline.drawOverlay();
    readout.hidden = index === null;
    if (index === null) return;
    this.fill(index);
    const { width, left, top } = timeline.box, x = timeline.px(timeline.at[index]), size = readout.offsetWidth;
    const beside = x + 16 + size <= width ? x + 16 : Math.max(x - 16 - size, 0);
    readout.style.left = `${x < left ? left : beside}px`;
    readout.style.top = `${top + 8}px`;
  }

  phaseAt(x) { return this.timeline.data.runs.find(([, , last]) => x <= last)?.[0] ?? ""; }

  fill(index) {
    const { data, x, at, levels, total, reserved, observed, readout } = this.timeline, rows = element("dl");
    const row = (kind, name, bytes, extra = "") => rows.append(
      element("dt", { class: extra }, element("i", { class: `swatch ${kind}` }), name),
      element("dd", { class: extra, "data-name": name, "data-bytes": bytes }, formatBytes(bytes)),
    );
    for (let level = levels.length - 1; level >= 0; level--) {
      const bytes = levels[level][index] - (level ? levels[level - 1][index] : 0);
      if (bytes) row(data.categories[level], data.categories[level], bytes);
    }
    row("line reserved", "reserved", reserved[index], "extra");
    const seen = observed ? lastAtOrBefore(observed.at, at[index]) : -1;
    if (seen >= 0) row("line observed", "observed here", observed.total[seen], "extra");
    const event = x[index], head = event ? `${this.phaseAt(event)}, event ${formatCount(event)}` : "before the step";
    readout.replaceChildren(
      element("h4", { "data-bytes": total[index], "data-event": event }, formatBytes(total[index]), element("small", {}, head)),
      rows,
    );
    if (!event) return;
    const [op, module, source] = data.instants[data.instant[index]], [tensor, kind] = data.tensors[data.tensor[index]];
    const change = data.change[index];
    readout.append(
      element("p", { class: "instant" }, element("code", {}, op), ` ${module || "(outside the model)"}`, ...(source ? [element("span", { class: "quiet" }, ` ${source}`)] : [])),
      element("p", { class: "quiet change", "data-bytes": change }, `${change < 0 ? "frees" : "allocates"} ${formatBytes(Math.abs(change))} of ${data.categories[data.category[index]]}, ${kind}${change < 0 ? `, made by ${tensor}` : ""}`),
    );
  }

  sentence(index) {
    const { data, x, total } = this.timeline, [op, module] = data.instants[data.instant[index]];
    return `Event ${formatCount(x[index])}, ${this.phaseAt(x[index])}: ${formatBytes(total[index])} allocated, ${op} ${module}`;
  }
}
