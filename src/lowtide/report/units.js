"use strict";
// Bytes for people, axis ticks, and small tools for drawing. formatBytes says exactly what lowtide.units.format_bytes says.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

// One decimal as Python writes it: an exact half goes to the even digit, where toFixed would go up.
function oneDecimal(value) {
  return value % 1 === 0.25 ? (value - 0.05).toFixed(1) : value.toFixed(1);
}

function formatBytes(bytes) {
  const sign = bytes < 0 ? "-" : "", size = Math.abs(bytes);
  for (const [unit, factor] of UNITS) {
    const text = oneDecimal(size / factor);
    if (Number(text) >= 1) return `${sign}${text} ${unit}`;
  }
  return `${sign}${Math.round(size)} B`;
}

const formatCount = (count) => Math.round(count).toLocaleString("en-US");

// The smallest of 1, 2 or 5 times a power of ten that gives at most `most` steps over a span.
function niceStep(span, most) {
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5].map((factor) => factor * power).find((step) => step >= rough) ?? 10 * power;
}

// Ticks that are round in the unit people read, not in bytes: 5 GiB, not 5,000,000,000.
function byteTicks(top, most) {
  const [unit, factor] = UNITS.find(([, size]) => top >= size) ?? ["B", 1];
  const step = niceStep(top / factor, most), ticks = [];
  for (let index = 0; index * step * factor <= top; index++) {
    ticks.push([index * step * factor, index ? `${Number((index * step).toFixed(3))} ${unit}` : "0"]);
  }
  return ticks;
}

function eventTicks(from, to, most) {
  const step = Math.max(1, niceStep(to - from, most)), ticks = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) ticks.push(value);
  return ticks;
}

function runningSum(changes) {
  const sums = new Float64Array(changes.length);
  let sum = 0;
  changes.forEach((change, index) => { sums[index] = sum += change; });
  return sums;
}

// Index of the last value that is not above x; -1 when all are.
function lastAtOrBefore(values, x) {
  let low = -1, high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= x) low = middle; else high = middle - 1;
  }
  return low;
}

// Straight lines between the given points, as numpy.interp draws them.
function interpolate(x, from, to) {
  const index = clamp(lastAtOrBefore(from, x), 0, from.length - 2), span = from[index + 1] - from[index];
  const share = span ? clamp((x - from[index]) / span, 0, 1) : 0;
  return to[index] + share * (to[index + 1] - to[index]);
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}
