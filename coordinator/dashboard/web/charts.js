// One figure with a heading, the value under the cursor, and a uPlot chart.
import { clock, el } from "./words.js";

const HEIGHT = 190;
const MARKED = { failure: "--bad", restart: "--warn", mode: "--mode" };
const timeSync = window.uPlot.sync("time");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  /** `format` writes a value; `byStep` has steps below instead of the time of day; `fromZero` keeps
   *  0 in sight; `sparse` joins points with nothing between them. */
  constructor(parent, { title, unit = "", format, byStep = false, fromZero = false, sparse = false, empty }) {
    Object.assign(this, { title, unit, format, byStep, fromZero, sparse });
    this.data = [[], []];
    this.steps = [];
    this.events = [];
    this.value = el("span", { class: "value" });
    this.note = el("p", { class: "empty" }, empty);
    this.box = el("div", { class: "plot", tabindex: "0", role: "img" });
    const words = el("h3", {}, title, unit ? el("span", { class: "unit" }, ` ${unit}`) : null);
    this.figure = el("figure", { class: "card chart" }, el("figcaption", {}, words, this.value), this.box, this.note);
    parent.append(this.figure);
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.box.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    this.resizing = new ResizeObserver(() => {
      const width = Math.floor(this.box.clientWidth);
      if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
    });
    this.resizing.observe(this.box);
  }

  /** xs, ys: numbers, null for a gap; steps: the step of each point; events: [{at, kind}]. */
  set(xs, ys, steps = [], events = []) {
    this.data = [xs, ys];
    this.steps = steps;
    this.events = events.filter((event) => event.kind in MARKED);
    const known = ys.some((y) => y !== null);
    this.note.hidden = known;
    this.box.hidden = !known;
    if (known && !this.plot) this.#draw();
    else if (known) this.plot.setData(this.data);
    this.#say(null);
  }

  remove() {
    this.resizing.disconnect();
    this.plot?.destroy();
    this.figure.remove();
  }

  /** Takes the colours from the theme. */
  recolour() {
    if (!this.plot) return;
    this.plot.destroy();
    this.plot = null;
    this.#draw();
  }

  #draw() {
    const axis = { stroke: colour("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const points = this.byStep ? { show: true, size: 6, fill: colour("--accent") } : { show: false };
    this.plot = new window.uPlot(
      {
        width: Math.floor(this.box.clientWidth) || 320,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, sync: this.byStep ? {} : { key: timeSync.key } },
        scales: { x: { time: !this.byStep, range: (_, min, max) => widen(min, max, this.byStep) }, y: { range: (_, min, max) => room(min, max, this.fromZero) } },
        axes: [
          { ...axis, space: 80, size: 30, ...(this.byStep ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7], values: (_, all) => all.map((v) => v.toLocaleString("en-US")) } : { values: (_, all, __, ___, gap) => all.map((v) => shortClock(v, gap)) }) },
          { ...axis, size: 56, values: (_, all, __, ___, gap) => all.map((v) => tick(v, gap)) },
        ],
        series: [{}, { stroke: colour("--accent"), width: 2, points, fill: colour("--under"), spanGaps: this.byStep || this.sparse }],
        hooks: { setCursor: [(plot) => this.#say(plot.cursor.idx)], drawAxes: [(plot) => this.#mark(plot)] },
      },
      this.data,
      this.box,
    );
  }

  #mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { at, kind } of this.events) {
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(MARKED[kind]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  #say(under) {
    const [xs, ys] = this.data;
    const last = ys.findLastIndex((y) => y !== null);
    const i = under ?? last;
    if (last < 0) {
      this.value.textContent = "";
      return;
    }
    const y = ys[i] === null || ys[i] === undefined ? "unknown" : this.format(ys[i]);
    const step = this.byStep ? xs[i] : this.steps[i];
    const where = this.byStep ? ` at step ${step?.toLocaleString("en-US")}` : ` at ${clock(xs[i])}${step ? `, step ${step.toLocaleString("en-US")}` : ""}`;
    this.value.textContent = under === null || under === undefined ? y : `${y}${where}`;
    this.box.setAttribute("aria-label", `${this.title} ${this.unit}: ${this.format(ys[last])} now; arrow keys read the curve. ${under === null ? "" : y + where}`);
  }

  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const most = this.data[0].length - 1;
    const i = Math.min(most, Math.max(0, (this.plot.cursor.idx ?? (by < 0 ? most + 1 : -1)) + by));
    const x = this.data[0][i];
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 10 });
  }
}

const widen = (min, max, byStep) => (min === null ? [0, 1] : min === max ? [min - (byStep ? 1 : 5), max + (byStep ? 1 : 5)] : [min, max]);

function room(min, max, fromZero) {
  if (min === null || max === null) return [0, 1];
  const low = fromZero ? Math.min(0, min) : min;
  const gap = (max - low || Math.abs(max) || 1) * 0.08;
  return [fromZero && low === 0 ? 0 : low - gap, max + gap];
}

function tick(v, gap) {
  if (v === 0) return "0";
  if (Math.abs(v) >= 1e9) return `${+(v / 1e9).toPrecision(4)}G`;
  if (Math.abs(v) >= 1e6) return `${+(v / 1e6).toPrecision(4)}M`;
  if (Math.abs(v) >= 1e4) return `${+(v / 1e3).toPrecision(4)}k`;
  if (Math.abs(v) < 1e-3) return v.toExponential(1);
  return v.toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9))));
}

function shortClock(unix, gap) {
  const moment = new Date(unix * 1000);
  const two = (n) => String(n).padStart(2, "0");
  if (gap >= 86400) return `${moment.getDate()}.${moment.getMonth() + 1}.`;
  const minutes = `${two(moment.getHours())}:${two(moment.getMinutes())}`;
  return gap < 60 ? `${minutes}:${two(moment.getSeconds())}` : minutes;
}
