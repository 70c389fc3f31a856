// Draws every chart of the page from the data that is embedded in it.

const PAGE_DATA = JSON.parse(document.getElementById("data").textContent);
for (const figure of document.querySelectorAll("figure[data-timeline]")) {
  const index = Number(figure.dataset.timeline);
  figure.timeline = new Timeline(figure, PAGE_DATA[index], index);
  new TimelineInput(figure.timeline);
}
for (const figure of document.querySelectorAll("figure[data-gantt]")) {
  figure.gantt = new Gantt(figure, PAGE_DATA[Number(figure.dataset.gantt)]);
  new GanttInput(figure.gantt);
}
for (const figure of document.querySelectorAll("figure[data-curve]")) figure.curve = new Curve(figure, PAGE_DATA[Number(figure.dataset.curve)]);
