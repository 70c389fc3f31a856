// Charts that a page draws from its data at the width that it has: marks over two axes, steps, and lines.

const MARK_RADIUS = 5.5, NAME_GAP = MARK_RADIUS + 3;

// A range of values as [low, high, is logarithmic], laid over pixels.
class Axis {
  constructor([low, high, isLog], from, to) {
    Object.assign(this, { low, high, isLog, from, to });
  }

  place(value) {
    const share = this.isLog
      ? Math.log(value / this.low) / Math.log(this.high / this.low)
      : (value - this.low) / (this.high - this.low);
    return this.from + share * (this.to - this.from);
  }

  ticks(most) {
    if (!this.isLog) {
      const step = niceStep(this.high - this.low, most), ticks = [];
      for (let index = Math.ceil(this.low / step); index * step <= this.high * (1 + 1e-9); index++) ticks.push(index * step);
      return ticks;
    }
    const powers = [];
    for (let power = Math.floor(Math.log10(this.low)); 10 ** power <= this.high; power++) powers.push(power);
    for (const factors of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const ticks = powers.flatMap((power) => factors.map((factor) => factor * 10 ** power))
        .filter((value) => this.low <= value && value <= this.high);
      if (ticks.length <= most || factors.length === 1) return ticks;
    }
  }
}

const tickText = (value) => Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 10 });
const line = (kind, x1, y1, x2, y2) => shape("line", { class: kind, x1, y1, x2, y2 });
const label = (kind, x, y, anchor, text) => shape("text", { class: kind, x, y, "text-anchor": anchor }, text);

function drawAxes(svg, across, up, [acrossName, upName]) {
  for (const value of across.ticks(Math.max(3, Math.round((across.to - across.from) / 75)))) {
    const x = across.place(value);
    svg.append(line("grid", x, up.to, x, up.from), label("tick", x, up.from + 18, "middle", tickText(value)));
  }
  for (const value of up.ticks(Math.max(3, Math.round((up.from - up.to) / 45)))) {
    const y = up.place(value);
    svg.append(line("grid", across.from, y, across.to, y), label("tick", across.from - 8, y + 4, "end", tickText(value)));
  }
  svg.append(label("axis", across.to, up.from + 38, "end", acrossName), label("axis", 0, up.to - 10, "start", upName));
}

function drawing(kind, width, height, words) {
  return shape("svg", {
    class: kind, viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": words,
  });
}

// Marks with their names beside them. Each mark is [name, x, y, kind, number of the mark that it belongs to or null].
function drawScatter(chart, data) {
  const width = chart.clientWidth, height = Math.min(Math.max(0.52 * width, 440), 540);
  const svg = drawing("scatter-chart", width, height, "Memory against speed");
  const across = new Axis(data.x, 46, width - 12), up = new Axis(data.y, height - 48, 28);
  chart.replaceChildren(svg, ...[...chart.children].filter((child) => child.tagName !== "svg"));
  drawAxes(svg, across, up, data.names);
  const place = ([, x, y]) => [across.place(x), up.place(y)];
  const front = data.front.map(([x, y]) => [across.place(x), up.place(y)]);
  if (front.length > 1) svg.append(shape("polyline", { class: "front-line", points: front.join(" ") }));
  const pairs = data.marks.filter((mark) => mark[4] !== null).map((mark) => [place(data.marks[mark[4]]), place(mark)]);
  for (const [start, end] of pairs) svg.append(line("to-published", ...start, ...end));
  const named = data.marks.filter((mark) => mark[4] === null);
  const texts = named.map((mark) => label(mark[3] === "on-front" ? "name on-front" : "name", 0, 0, "start", mark[0]));
  svg.append(...texts);
  const sizes = texts.map((text) => text.getBBox());
  const dots = data.marks.map((mark) => boxAround(place(mark), MARK_RADIUS));
  const lines = [...front.slice(1).map((point, index) => [front[index], point]), ...pairs];
  const bounds = { left: across.from, right: across.to, top: up.to, bottom: up.from };
  placeNames(named.map(place), sizes, dots, lines, bounds).forEach((box, index) => {
    const [x, y] = place(named[index]), near = nearest(box, [x, y]);
    if (Math.hypot(near[0] - x, near[1] - y) > 1.8 * NAME_GAP) svg.prepend(line("leader", x, y, ...near));
    texts[index].setAttribute("x", box.left);
    texts[index].setAttribute("y", box.top - sizes[index].y);
  });
  // Marks come last, so that none lies under a line or a name; the unseen circle is what a finger can hit.
  const order = data.marks.map((_, number) => number).sort((a, b) => (data.marks[b][3] === "published") - (data.marks[a][3] === "published"));
  for (const number of order) {
    const [cx, cy] = place(data.marks[number]), kind = data.marks[number][3];
    const group = shape("g", { class: `mark ${kind}`, tabindex: 0, role: "img", "data-mark": number });
    group.append(shape("circle", { class: "target", cx, cy, r: 12 }), shape("circle", { class: "dot", cx, cy, r: MARK_RADIUS }));
    svg.append(group);
  }
}

const boxAround = ([x, y], radius) => ({ left: x - radius, right: x + radius, top: y - radius, bottom: y + radius });
const nearest = (box, [x, y]) => [clamp(x, box.left, box.right), clamp(y, box.top, box.bottom)];
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

function crosses([[x, y], [endX, endY]], box) {
  for (let share = 0; share <= 1; share += 0.05) {
    const at = [x + share * (endX - x), y + share * (endY - y)];
    if (at[0] > box.left && at[0] < box.right && at[1] > box.top && at[1] < box.bottom) return true;
  }
  return false;
}

// A box for each name: the nearest to its mark that is free of marks and of other names, and of lines where it can be.
function placeNames(points, sizes, dots, lines, bounds) {
  const crowd = points.map(([x, y]) => points.filter(([a, b]) => Math.abs(a - x) < 120 && Math.abs(b - y) < 45).length);
  const placed = new Array(points.length);
  for (const index of points.map((_, number) => number).sort((a, b) => crowd[b] - crowd[a])) {
    const [x, y] = points[index], { width, height } = sizes[index];
    let least = Infinity;
    for (let distance = NAME_GAP; distance < 400 && distance < least; distance *= 1.18) {
      for (let turn = 0; turn < 16; turn++) {
        const angle = (Math.PI * turn) / 8;
        const left = x + Math.cos(angle) * (distance + width / 2) - width / 2;
        const top = y + Math.sin(angle) * (distance + height / 2) - height / 2;
        const box = { left, top, right: left + width, bottom: top + height };
        // Two names in a line must not read as one.
        const roomy = { left: left - 7, top, right: box.right + 7, bottom: box.bottom };
        const taken = dots.filter((dot) => meet(box, dot)).length + placed.filter((other) => other && meet(roomy, other)).length;
        const isOut = box.left < bounds.left || box.right > bounds.right || top < bounds.top || box.bottom > bounds.bottom;
        const crossed = lines.filter((each) => crosses(each, box)).length;
        const apart = ([a, b]) => Math.hypot(clamp(a, left, box.right) - a, clamp(b, top, box.bottom) - b);
        const mistaken = points.filter((other) => apart(other) < apart(points[index])).length;
        // To the right of its mark a name reads as belonging to it; to the left is the next best.
        const side = turn === 0 ? 0 : turn === 8 ? 1 : 3;
        const cost = distance + side + 15 * mistaken + 40 * crossed + 1e4 * taken + 1e6 * isOut;
        if (cost < least) [least, placed[index]] = [cost, box];
      }
    }
  }
  return placed;
}

// The memory of one step: {points, spans, predicted, peak} in one unit, up to a top that several charts may share.
function drawStep(figure, data, top) {
  const width = 320, height = 150, left = 34, right = 318, foot = 128;
  const svg = drawing("step", width, height, figure.querySelector("figcaption").textContent);
  const up = new Axis([0, 1.06 * top, false], foot, 8), step = (right - left) / data.points.length;
  data.spans.forEach(([phase, start, end], index) => {
    const [from, to] = [start, end].map((share) => left + share * (right - left));
    if (index % 2) svg.append(shape("rect", { class: "band", x: from, y: 8, width: to - from, height: foot - 8 }));
    // A phase too narrow for its name goes without; the table of phases has it.
    if (to - from >= 6.6 * phase.length) svg.append(label("tick", (from + to) / 2, foot + 15, "middle", phase));
  });
  for (const value of up.ticks(4)) {
    const y = up.place(value);
    svg.append(line("grid", left, y, right, y), label("tick", left - 5, y + 4, "end", tickText(value)));
  }
  const path = data.points.map((value, index) => {
    const [x, y] = [left + index * step, up.place(value).toFixed(1)];
    return `${x.toFixed(1)} ${y}L${(x + step).toFixed(1)} ${y}`;
  }).join("L");
  svg.append(shape("path", { class: "mass", d: `M${left} ${foot}L${path}L${right} ${foot}Z` }), shape("path", { class: "outline", d: `M${path}` }));
  if (data.predicted !== null) svg.append(line("predicted", left, up.place(data.predicted), right, up.place(data.predicted)));
  const peak = { class: "peak-dot", cx: left + (data.peak + 0.5) * step, cy: up.place(data.points[data.peak]), r: 3.5 };
  svg.append(shape("circle", peak), line("foot", left, foot, right, foot));
  figure.querySelector("svg")?.remove();
  figure.append(svg);
}

// Lines over one axis: each is [kind, points], a point [x, y, words, whether it is marked].
function drawLines(chart, data) {
  const width = Math.min(chart.clientWidth, 720), height = Math.max(0.47 * width, 300);
  const svg = drawing("lines", width, height, data.words);
  const across = new Axis(data.x, 42, width - 12), up = new Axis(data.y, height - 48, 28);
  chart.replaceChildren(svg);
  drawAxes(svg, across, up, data.names);
  for (const [kind, points] of data.lines) {
    const places = points.map(([x, y]) => [across.place(x), up.place(y)]);
    svg.append(shape("polyline", { class: `budget-line ${kind}`, points: places.join(" ") }));
    points.forEach(([, , words, isMarked], index) => {
      const [cx, cy] = places[index], group = shape("g");
      group.append(shape("title", {}, words));
      if (isMarked) group.append(shape("circle", { class: "reversal", cx, cy, r: 9 }));
      group.append(shape("circle", { class: `budget-dot ${kind}`, cx, cy, r: 4 }));
      svg.append(group);
    });
  }
}
