// Rows of a session's chart: spans of one chunk or of one lane in order of time, found by view and by pixel.

class GanttRow {
  constructor({ label, isLane, from, to, kind, describe }) {
    this.label = label;
    this.isLane = isLane;
    this.from = from;
    this.to = to;
    this.kind = kind;
    this.describe = describe; // index of a span -> what the readout says
    // A module may enclose the next one, so ends are not in order; the latest end so far is.
    this.latest = new Float64Array(to.length);
    let latest = -Infinity;
    to.forEach((end, index) => { this.latest[index] = latest = Math.max(latest, end); });
  }

  // The first span that is not over at `time`, and the one past the last that has begun by `until`.
  range(time, until) { return [lastAtOrBefore(this.latest, time - 1e-9) + 1, lastAtOrBefore(this.from, until) + 1]; }

  // The innermost span under [from, to]; with several, the one nearest to the middle.
  find(from, to) {
    const [first, past] = this.range(from, to), middle = (from + to) / 2;
    let best = null, distance = Infinity;
    for (let index = first; index < past; index++) {
      if (this.to[index] < from) continue;
      const away = middle < this.from[index] ? this.from[index] - middle : Math.max(middle - this.to[index], 0);
      if (away <= distance) [best, distance] = [index, away];
    }
    return best;
  }
}

// Chunk rows, then lane rows, from the columns that Python wrote.
function ganttRows(data) {
  const { residency, lanes, names } = data, rows = [];
  const members = residency.chunk.map(() => []);
  residency.row.forEach((row, index) => members[row].push(index));
  members.forEach((indices, row) => {
    const pick = (column) => indices.map((index) => column[index]), chunk = names[residency.chunk[row]], group = names[residency.group[row]];
    rows.push(Object.assign(new GanttRow({
      label: group, isLane: false, from: pick(residency.from), to: pick(residency.to), kind: pick(residency.kind).map((kind) => names[kind]),
      describe: (at) => ({ name: chunk, facts: [["group", group]], bytes: residency.bytes[indices[at]] }),
    }), { chunk, group }));
  });
  for (const lane of lanes) {
    rows.push(Object.assign(new GanttRow({
      label: lane.lane, isLane: true, from: lane.from, to: lane.to, kind: lane.kind.map((kind) => names[kind]),
      describe: (at) => ({
        name: names[lane.name[at]], bytes: lane.bytes[at],
        facts: [["lane", lane.lane], ["phase", names[lane.phase[at]]], ["step", formatCount(lane.step[at])]],
      }),
    }), { texts: lane.name.map((name) => names[name]) }));
  }
  return rows;
}

// Seconds as lowtide.units.format_seconds writes them, for lengths below a minute; from microseconds.
function formatMicroseconds(time) {
  const length = Math.abs(time), sign = time < 0 ? "-" : "";
  if (length === 0) return "0 s";
  for (const [unit, factor] of [["\u00b5s", 1], ["ms", 1e-3]]) if (Number((length * factor).toFixed(1)) < 1000) return `${sign}${(length * factor).toFixed(1)} ${unit}`;
  return `${sign}${(length * 1e-6).toFixed(length < 1e8 ? 2 : 0)} s`;
}

// Round ticks in one unit for the whole axis: 20 ms, 40 ms, not 20000 and 0.04.
function timeTicks(from, to, most) {
  const step = niceStep(to - from, most), [unit, factor] = to >= 2e6 ? ["s", 1e-6] : to >= 2e3 ? ["ms", 1e-3] : ["\u00b5s", 1], ticks = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to; index++) {
    const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
    ticks.push([index * step, index ? `${(index * step * factor).toFixed(digits)} ${unit}` : "0"]);
  }
  return ticks;
}
