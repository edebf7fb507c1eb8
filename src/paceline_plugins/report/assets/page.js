// SPDX-License-Identifier: Apache-2.0
// Draws the charts of a run's page, and keeps a live page up to date. Text from the run is only ever set as text.
"use strict";
(() => {
  const root = document.documentElement;
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3], [5, 3], [14, 4], [2, 6], [9, 3, 2, 3, 2, 3]];
  const ROWS = 50; // of a table
  const HINT = "Left and right arrows move the cursor, plus and minus zoom, Escape shows all.";
  const drawn = new Map(); // key -> Drawn
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const known = (value) => value !== null && value !== undefined;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function button(label, about, act) {
    const made = element("button", { type: "button", "aria-label": about, title: about }, label);
    made.addEventListener("click", act);
    return made;
  }

  /** 250000 as 250k; 1.49832 with as many digits as tell points apart. */
  function count(value) {
    for (const [scale, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= scale) return +(value / scale).toPrecision(4) + unit;
    return String(+value.toPrecision(4));
  }
  const figure = (value) => (!known(value) ? "–" : Math.abs(value) >= 1e4 ? count(value) : String(+value.toPrecision(5)));

  /** A chart of the page: its picture, its legend that follows the cursor, its buttons, its table. */
  class Drawn {
    constructor(place, chart) {
      this.place = place;
      this.chart = chart;
      const name = chart.title;
      this.y = element("div", { class: "y" });
      this.plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `Chart: ${name}. ${HINT}` });
      this.spoken = element("div", { class: "hidden", role: "status" });
      this.legend = element("div", { class: "legend" });
      this.table = element("div", { class: "wide", tabindex: "0" });
      this.details = element("details", {}, element("summary", {}, `Table: ${name}`), this.table);
      const tools = element("div", { class: "tools" },
        button("+", `Zoom in: ${name}`, () => this.zoom(0.5)),
        button("−", `Zoom out: ${name}`, () => this.zoom(2)),
        button("All", `Show all: ${name}`, () => this.all()),
        button("PNG", `Save as picture: ${name}`, () => this.save()));
      place.append(element("div", { class: "above" }, this.y, tools), this.plot, this.spoken, this.legend, this.details);
      this.details.addEventListener("toggle", () => this.fillTable());
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.width = 0;
      this.zoomed = false;
      new ResizeObserver(() => this.resize()).observe(this.plot);
      this.build();
    }

    get data() {
      return uPlot.join(this.chart.lines.map((line) => [line.x, line.y]));
    }

    /** Whether another set of lines has to be drawn, not only other points. */
    same(chart) {
      const shape = (one) => JSON.stringify([one.x, one.y, one.bars, one.lines.map((line) => [line.name, line.colour, line.pale])]);
      return shape(chart) === shape(this.chart);
    }

    update(chart) {
      const same = this.same(chart);
      const { zoomed } = this;
      this.chart = chart;
      if (!same) return this.build();
      this.u.setData(this.data, !zoomed);
      if (zoomed) this.u.redraw();
      this.follow();
      this.fillTable();
    }

    /** The range of x of all points; lines begin at 0. */
    range(x = this.u.data[0]) {
      if (!x.length) return [0, 1];
      const half = x.length > 1 ? (x[1] - x[0]) / 2 : 0.5;
      if (this.chart.bars) return [x[0] - half, x[x.length - 1] + half];
      return [Math.min(0, x[0]), (x.length > 1 ? 1 : 1.1) * x[x.length - 1] || 1];
    }

    /** The shown range of x; uPlot asks for it before that of y. */
    rangeOfX(u, low, high) {
      const x = u.data[0];
      const [first, last] = this.range(x);
      this.zoomed = known(low) && !(low <= first && high >= last) && !(low === x[0] && high === x[x.length - 1]);
      return this.zoomed ? [low, high] : [first, last];
    }

    size() {
      const width = Math.max(200, this.plot.clientWidth);
      return { width, height: width < 480 ? 220 : 270 };
    }

    build() {
      if (this.u) this.u.destroy();
      const { chart } = this;
      this.y.textContent = chart.y;
      const ink = () => colour("--pale");
      const axis = { stroke: ink, grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
      const options = {
        ...this.size(),
        legend: { show: false },
        padding: [8, 10, 0, 0],
        scales: { x: { time: false, range: (u, low, high) => this.rangeOfX(u, low, high) }, y: { range: (u, low, high) => this.rangeOfY(low, high) } },
        axes: [
          { ...axis, label: chart.x, labelSize: 20, labelFont: "12px system-ui, sans-serif", size: 34, values: (u, all) => all.map(count) },
          { ...axis, size: (u, all) => 14 + 7 * Math.max(1, ...(all || []).map((text) => text.length)), values: (u, all) => all.map(figure) },
        ],
        series: [{}, ...chart.lines.map((line) => this.series(line))],
        cursor: { y: false, dataIdx: (u, series, at) => nearest(u.data[series], at), drag: { x: true, y: false }, points: { size: 7 } },
        hooks: { setCursor: [() => this.follow()] },
      };
      this.u = new uPlot(options, this.data, this.plot);
      this.follow();
      this.fillTable();
    }

    series(line) {
      const stroke = colour(`--c${line.colour % 8}`);
      const shown = { label: line.name, stroke: line.pale ? stroke + "59" : stroke, width: line.pale ? 1 : 2.2, points: { show: (line.dots && line.x.length < 200) || line.y.filter(known).length === 1, size: 6, fill: stroke } };
      if (this.chart.bars)
        return { ...shown, width: 1.5, fill: stroke + (this.chart.lines.length > 1 ? "44" : "cc"), paths: uPlot.paths.bars({ size: [0.86, 100] }), points: { show: false } };
      return { ...shown, dash: line.pale ? [] : DASHES[line.colour % 8] };
    }

    rangeOfY(low, high) {
      const { chart } = this;
      if (!known(low)) return [0, 1];
      const room = 0.07 * (high - low) || 0.07 * Math.abs(high) || 1;
      const own = this.zoomed ? [low - room, high + room] : [chart.low ?? low - room, chart.high ?? high + room];
      return [chart.low === 0 ? Math.max(0, Math.min(own[0], low)) : own[0], own[1]];
    }

    /** The values under the cursor, or the last ones. */
    follow() {
      if (!this.u) return;
      const { idx, idxs } = this.u.cursor;
      const x = this.u.data[0];
      const at = known(idx) ? idx : x.length - 1;
      const plain = this.chart.bars && !known(idx); // the last bar says nothing of the others
      const cells = this.chart.lines.map((line, k) => [line, this.u.data[k + 1][known(idx) ? (idxs[k + 1] ?? at) : nearest(this.u.data[k + 1], at)]]);
      const shown = cells.filter(([line]) => !line.pale || this.chart.lines.every((other) => other.pale));
      this.told = `${this.chart.x}: ${figure(x[at])}; ` + shown.map(([line, value]) => `${line.name} ${figure(value)}`).join("; ");
      this.legend.replaceChildren(
        ...shown.map(([line, value]) => element("span", {}, swatch(line, this.chart.bars), element("span", {}, line.name), plain ? "" : element("b", {}, figure(value)))),
        plain ? "" : element("span", { class: "y" }, `at ${figure(x[at])}`));
    }

    key(event) {
      const x = this.u.data[0];
      const step = event.shiftKey ? 10 : 1;
      const at = this.u.cursor.idx ?? x.length - 1;
      const moves = { ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: x.length - 1 };
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.plot) return;
      if (event.key in moves) this.move(Math.min(x.length - 1, Math.max(0, moves[event.key])));
      else if (event.key === "+" || event.key === "=") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (event.key === "Escape") this.all();
      else return;
      event.preventDefault();
    }

    async move(index) {
      const at = this.u.data[0][index];
      const { min, max } = this.u.scales.x;
      if (at < min || at > max) await this.show(at - (max - min) / 2, at + (max - min) / 2); // drawn in a microtask
      this.u.setCursor({ left: this.u.valToPos(at, "x"), top: this.u.over.clientHeight / 2 });
      this.spoken.textContent = this.told;
    }

    zoom(factor) {
      const { min, max } = this.u.scales.x;
      const { idx } = this.u.cursor;
      const middle = known(idx) ? this.u.data[0][idx] : (min + max) / 2;
      const half = ((max - min) * factor) / 2;
      this.show(middle - half, middle + half);
    }

    /** Show a part of x, within the range of all points. */
    show(min, max) {
      const [low, high] = this.range();
      const width = Math.min(max - min, high - low);
      const start = Math.min(Math.max(min, low), high - width);
      if (width > 0) this.u.setScale("x", { min: start, max: start + width });
    }

    all() {
      this.u.setData(this.u.data, true);
      this.spoken.textContent = "All is shown.";
    }

    resize() {
      if (!this.plot.clientWidth || this.plot.clientWidth === this.width) return;
      this.width = this.plot.clientWidth;
      this.u.setSize(this.size());
    }

    fillTable() {
      if (!this.details.open) return;
      const { data } = this.u;
      const many = Math.min(ROWS, data[0].length);
      const picked = Array.from({ length: many }, (_, k) => Math.round((k * (data[0].length - 1)) / Math.max(1, many - 1)));
      const names = [this.chart.x, ...this.chart.lines.map((line) => (line.pale ? `${line.name}, as reported` : line.name))];
      const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
      const rows = picked.map((at) => element("tr", {}, ...data.map((column, k) => element("td", {}, figure(k ? column[nearest(column, at)] : column[at])))));
      this.table.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
      markWide();
    }

    /** The picture with its title and legend, as a file. */
    save() {
      const source = this.u.ctx.canvas;
      const scale = source.width / this.u.width;
      const sheet = element("canvas", { width: source.width, height: Math.round(source.height + 70 * scale) });
      const ctx = sheet.getContext("2d");
      ctx.fillStyle = colour("--paper");
      ctx.fillRect(0, 0, sheet.width, sheet.height);
      ctx.scale(scale, scale);
      ctx.fillStyle = colour("--ink");
      ctx.font = "bold 16px system-ui, sans-serif";
      ctx.fillText(this.chart.title, 12, 24);
      ctx.font = "12px system-ui, sans-serif";
      let left = 12;
      for (const line of this.chart.lines.filter((one) => !one.pale)) {
        ctx.fillStyle = ctx.strokeStyle = colour(`--c${line.colour % 8}`);
        ctx.setLineDash(DASHES[line.colour % 8]);
        ctx.lineWidth = 2.2;
        ctx.beginPath();
        ctx.moveTo(left, 40);
        ctx.lineTo(left + 26, 40);
        ctx.stroke();
        ctx.fillText(line.name, left + 32, 44);
        left += 50 + ctx.measureText(line.name).width;
      }
      ctx.fillStyle = colour("--pale");
      ctx.fillText(this.chart.y, 12, 64);
      ctx.drawImage(source, 0, 70, this.u.width, this.u.height);
      element("a", { download: `${this.chart.key}.png`, href: sheet.toDataURL("image/png") }).click();
    }
  }

  /** The place of the known value that is nearest to `at`. */
  function nearest(column, at) {
    for (let away = 0; away < column.length; away++)
      for (const place of [at - away, at + away]) if (known(column[place])) return place;
    return at;
  }

  function swatch(line, bars) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const mark = document.createElementNS("http://www.w3.org/2000/svg", bars ? "rect" : "line");
    const given = bars ? { x: 4, y: 0, width: 16, height: 10, fill: colour(`--c${line.colour % 8}`) } : { x1: 0, y1: 5, x2: 27, y2: 5, "stroke-width": 2.5, stroke: colour(`--c${line.colour % 8}`), "stroke-dasharray": DASHES[line.colour % 8].join(" ") || "none" };
    for (const [name, value] of Object.entries(given)) mark.setAttribute(name, value);
    made.setAttribute("viewBox", "0 0 27 10");
    made.setAttribute("aria-hidden", "true");
    made.append(mark);
    return made;
  }

  function drawAll(charts) {
    for (const [key, chart] of Object.entries(charts)) {
      const place = document.querySelector(`figure[data-chart="${CSS.escape(key)}"]`);
      if (drawn.has(key) && drawn.get(key).place === place) drawn.get(key).update(chart);
      else if (place) drawn.set(key, new Drawn(place, chart));
    }
  }

  /** A table that is wider than its place says that it scrolls. */
  function markWide() {
    for (const wide of document.querySelectorAll(".wide")) wide.classList.toggle("scrolls", wide.scrollWidth > wide.clientWidth + 1);
  }
  addEventListener("resize", markWide);

  const again = () => drawn.forEach((one) => one.build());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => { root.classList.add("print"); again(); });
  addEventListener("afterprint", () => { root.classList.remove("print"); again(); });

  // -- a live page ------------------------------------------------------------------------------------------------

  const waiting = new Map(); // key -> HTML of a section that stays while the reader has selected text in it

  /** Bring the sections into the order of the page; the server has escaped all text in them. */
  function arrange(order, parts) {
    const main = document.querySelector("main");
    Object.entries(parts).forEach(([key, html]) => waiting.set(key, html));
    let before = null;
    for (const key of order) {
      let section = document.getElementById(`part-${key}`);
      if (!section) section = element("section", { id: `part-${key}` });
      const next = before ? before.nextElementSibling : main.querySelector("section");
      if (section !== next) main.insertBefore(section, next);
      before = section;
      if (waiting.has(key) && (getSelection().isCollapsed || !getSelection().containsNode(section, true))) {
        if (!key.startsWith("chart-") || !drawn.has(key.slice("chart-".length))) replace(section, waiting.get(key));
        waiting.delete(key);
      }
    }
    for (const section of document.querySelectorAll("main > section"))
      if (!order.includes(section.id.slice("part-".length))) section.remove();
    for (const [key, one] of drawn) if (!one.place.isConnected && drawn.delete(key)) one.u.destroy();
  }

  function replace(section, html) {
    const before = [...section.querySelectorAll(".wide")].map((wide) => [wide.scrollLeft, wide === document.activeElement]);
    section.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
    section.querySelectorAll(".wide").forEach((wide, k) => {
      const [left, focused] = before[k] ?? [0, false];
      wide.scrollLeft = left;
      if (focused) wide.focus({ preventScroll: true });
    });
  }

  function follow(live) {
    const bar = document.querySelector(".live");
    const status = document.getElementById("status");
    const pause = document.getElementById("pause");
    let { revision, over } = live;
    /** A screen reader is told when the state changes, not of each new number. */
    const say = (text, state) => {
      if (bar.className !== `live ${state}`) document.getElementById("said").textContent = text;
      bar.className = `live ${state}`;
      status.textContent = text;
    };
    say(live.status, over ? "over" : "on");
    pause.addEventListener("click", () => {
      const paused = pause.getAttribute("aria-pressed") !== "true";
      pause.setAttribute("aria-pressed", String(paused));
      pause.textContent = paused ? "Go on" : "Pause";
    });
    async function poll() {
      if (pause.getAttribute("aria-pressed") !== "true" && document.visibilityState === "visible") {
        try {
          const query = new URLSearchParams(location.search);
          query.set("since", revision);
          const answer = await fetch(`data?${query}`, { cache: "no-store", signal: AbortSignal.timeout(30000) });
          if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
          const news = await answer.json();
          ({ revision, over } = news);
          arrange(news.order, news.parts);
          drawAll(news.charts);
          markWide();
          say(news.status, over ? "over" : "on");
        } catch (error) {
          say("No answer: paceline watch has ended, or the connection to it. This page keeps what it has.", "lost");
        }
      }
      setTimeout(poll, 1000 * live.every_s);
    }
    setTimeout(poll, 1000 * live.every_s);
  }

  const page = JSON.parse(document.getElementById("data").textContent);
  drawAll(page.charts);
  markWide();
  if (page.live) follow(page.live);
})();
