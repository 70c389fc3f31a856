// Tables that sort by their heads, the readout beside a mark, and the charts of all comparisons.

const PAGE_DATA = JSON.parse(document.getElementById("data").textContent);

function sortValue(row, column) {
  const value = row.cells[column].querySelector("[data-value]")?.dataset.value ?? row.cells[column].textContent.trim();
  if (value === "" || value === "–" || value === "nan") return null;
  const number = Number(value.replace(/[,%]/g, ""));
  return Number.isNaN(number) ? value : number;
}

// What is not known goes last, whichever way the rest is turned; equal rows keep their order.
function compareRows(one, other, column, sign) {
  const [a, b] = [sortValue(one, column), sortValue(other, column)];
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

function makeSortable(table) {
  const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (head.classList.contains("bars")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      // Up, down, and then as it was.
      const next = { null: "ascending", ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      if (next) head.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      const rows = next ? [...original].sort((a, b) => compareRows(a, b, column, sign)) : original;
      body.append(...rows);
    });
  });
}

class Readout {
  constructor(figure, details) {
    this.figure = figure;
    this.details = details;
    this.chart = figure.querySelector(".chart");
    this.box = figure.querySelector(".readout");
    this.listen();
  }

  // To the marks that are drawn now.
  listen() {
    for (const mark of this.figure.querySelectorAll(".mark")) {
      const [name, facts] = this.details[Number(mark.dataset.mark)];
      mark.setAttribute("aria-label", `${name}: ${facts.map((fact) => fact.join(" ")).join("; ")}`);
      for (const event of ["pointerenter", "focus"]) mark.addEventListener(event, () => this.show(mark, name, facts));
      mark.addEventListener("pointerleave", () => { if (document.activeElement !== mark) this.hide(); });
      mark.addEventListener("blur", () => this.hide());
      mark.addEventListener("keydown", (event) => { if (event.key === "Escape") this.hide(); });
    }
  }

  show(mark, name, facts) {
    const head = document.createElement("h4"), list = document.createElement("dl");
    head.textContent = name;
    for (const [what, text] of facts) {
      const term = document.createElement("dt"), value = document.createElement("dd");
      term.textContent = what;
      value.textContent = text;
      list.append(term, value);
    }
    this.box.replaceChildren(head, list);
    this.box.hidden = false;
    // On the side of the mark that has more room, and never outside of the chart.
    const frame = this.chart.getBoundingClientRect(), dot = mark.querySelector(".dot").getBoundingClientRect();
    const x = dot.left + dot.width / 2 - frame.left, y = dot.top + dot.height / 2 - frame.top;
    const left = x < frame.width / 2 ? x + 18 : x - this.box.offsetWidth - 18;
    this.box.style.left = `${Math.min(Math.max(left, 0), Math.max(frame.width - this.box.offsetWidth, 0))}px`;
    this.box.style.top = `${Math.min(Math.max(y - this.box.offsetHeight / 2, 0), Math.max(frame.height - this.box.offsetHeight, 0))}px`;
  }

  hide() { this.box.hidden = true; }
}

function drawSteps(part, steps) {
  const figures = part.querySelectorAll(".multiple"), same = part.querySelector(".same").checked;
  const top = Math.max(...steps.map((step) => step.top));
  figures.forEach((figure, index) => drawStep(figure, steps[index], same ? top : steps[index].top));
}

function drawCharts() {
  for (const figure of document.querySelectorAll("figure[data-scatter]")) {
    const { scatter, details } = PAGE_DATA.comparisons[Number(figure.dataset.scatter)];
    drawScatter(figure.querySelector(".chart"), scatter);
    if (figure.readout) figure.readout.listen(); else figure.readout = new Readout(figure, details);
  }
  for (const figure of document.querySelectorAll("figure[data-sweep]")) {
    drawLines(figure.querySelector(".chart"), PAGE_DATA.sweeps[Number(figure.dataset.sweep)]);
  }
}

document.querySelectorAll(".sortable table").forEach(makeSortable);
for (const part of document.querySelectorAll("[data-steps]")) {
  const { steps } = PAGE_DATA.comparisons[Number(part.dataset.steps)];
  drawSteps(part, steps);
  part.querySelector(".same").addEventListener("change", () => drawSteps(part, steps));
}
drawCharts();
let drawnWidth = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  if (document.documentElement.clientWidth === drawnWidth) return;  // a phone hides its bars while it scrolls
  drawnWidth = document.documentElement.clientWidth;
  drawCharts();
});
