
"use strict";
(() => {
  const MOST_POINTS = 4000, STALE_SECONDS = 8, RECONNECT_MS = 5000;
  const SVG = "http://www.w3.org/2000/svg";
  const at = (id) => document.getElementById(id);
  // Names come from strangers: they only ever become text.
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined && text !== null) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const drawn = (name, values, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const say = (id, text) => { const one = at(id); if (one.textContent !== text) one.textContent = text; };

  // ---- numbers in words

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const count = (value) => known(value) ? whole.format(value) : "–";
  const short = (value) => {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= limit) return `${trimmed(value / (letter === "k" ? 1e3 : limit), 3)}${letter}`;
    return size >= 100 ? whole.format(value) : trimmed(value, 3);
  };
  const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));
  const lossWords = (value) => !known(value) ? "–" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : value.toFixed(Math.abs(value) >= 100 ? 1 : 4);
  const bytes = (value) => {
    if (!known(value)) return "–";
    let unit = 0;
    while (value >= 1000 && unit < 5) { value /= 1000; unit += 1; }
    return `${value >= 100 || unit === 0 ? whole.format(value) : trimmed(value, 3)} ${["B", "kB", "MB", "GB", "TB", "PB"][unit]}`;
  };
  const span = (seconds) => {
    if (!known(seconds)) return "–";
    const s = Math.max(0, Math.round(seconds));
    if (seconds > 0 && seconds < 9.95 && seconds % 1) return `${seconds.toFixed(1)}\u00a0s`;
    if (s < 60) return `${s}\u00a0s`;
    if (s < 3600) return `${Math.floor(s / 60)}\u00a0min${s < 600 && s % 60 ? ` ${s % 60}\u00a0s` : ""}`;
    if (s < 86400) return `${Math.floor(s / 3600)}\u00a0h${Math.floor(s % 3600 / 60) ? ` ${Math.floor(s % 3600 / 60)}\u00a0min` : ""}`;
    return `${Math.floor(s / 86400)}\u00a0d${Math.floor(s % 86400 / 3600) ? ` ${Math.floor(s % 86400 / 3600)}\u00a0h` : ""}`;
  };
  const percent = (share) => known(share) ? `${trimmed(share * 100, share < 0.1 ? 2 : 3)}\u00a0%` : "–";
  const moment = (seconds) => {
    const when = new Date(seconds * 1000);
    if (Number.isNaN(when.getTime())) return "–";
    const day = when.toDateString() === new Date().toDateString();
    return when.toLocaleString(undefined, day ? { hour: "2-digit", minute: "2-digit", second: "2-digit" } : { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  };

  // ---- the state

  const state = { points: [], heard: performance.now(), isConnected: false };
  const chosen = { by: "step", scale: "linear", curve: "smoothed" };

  function take(news) {
    state.heard = performance.now();
    const { points, more, ...sections } = news;
    if (points) state.points = points;
    for (const one of more || []) {
      while (state.points.length && state.points[state.points.length - 1][0] >= one[0]) state.points.pop();
      state.points.push(one);
    }
    if (state.points.length > MOST_POINTS) state.points = state.points.filter((_, place) => place % 2 || place > MOST_POINTS - 500);
    Object.assign(state, sections);
    if (sections.run) showNow();
    if (points || more) { soon("spark", showSpark); charts.forEach((one) => soon(one.options.name, () => one.draw())); }
    if ("join" in sections) soon("join", showJoin);
    if ("round" in sections) soon("round", showRound);
    if (sections.people) soon("people", showPeople);
    if ("board" in sections) soon("board", showBoard);
    if ("events" in sections) soon("events", showEvents);
    if (sections.checkpoints) soon("checkpoints", showCheckpoints);
    if ("definition" in sections) soon("definition", showDefinition);
    showAge();
  }

  // Each part is drawn in a task of its own, so that the page answers meanwhile on a weak phone.
  const due = new Map();
  let isDrawing = false;
  function soon(name, draw) {
    due.set(name, draw);
    if (isDrawing) return;
    isDrawing = true;
    at("main").setAttribute("aria-busy", "true");
    setTimeout(drawNext);
  }
  function drawNext() {
    const [name, draw] = due.entries().next().value;
    due.delete(name);
    try { draw(); } finally {
      if (due.size) setTimeout(drawNext);
      else { isDrawing = false; at("main").removeAttribute("aria-busy"); }
    }
  }

  // The rows of a table are made some at a time, and shown together. `made` makes that of one value.
  const ROWS_AT_ONCE = 50;
  function fill(id, values, made, rows = []) {
    const begin = rows.length;
    if (!begin) due.delete(`more of ${id}`); // those of an older list
    rows.push(...values.slice(begin, begin + ROWS_AT_ONCE).map(made));
    if (rows.length < values.length) soon(`more of ${id}`, () => fill(id, values, made, rows));
    else at(id).tBodies[0].replaceChildren(...rows);
  }

  // ---- now

  const bar = (id, share) => { at(id).style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`; };

  function showNow() {
    const run = state.run;
    say("name", run.name || "potluck");
    say("description", run.description);
    const title = run.name ? `${run.name}: step ${count(run.step)}${known(run.loss) ? `, loss ${lossWords(run.loss)}` : ""}` : "potluck";
    if (document.title !== title) document.title = title;
    const bad = ["network lost", "failed", "refused"].includes(run.phase) || run.healthy === false;
    const warm = ["preparing", "catching up", "following", "paused", "leaving", "left"].includes(run.phase);
    say("phase", run.healthy === false ? `${run.phase}, with trouble` : run.phase);
    at("phase").className = `badge${bad ? " bad" : warm ? " warm" : ""}`;
    say("step", run.steps ? `${count(run.step)} of ${count(run.steps)}` : count(run.step));
    say("step-more", `${short(run.samples)} samples in ${span(run.seconds)}`);
    bar("step-bar", run.steps ? run.step / run.steps : 0);
    say("loss", lossWords(run.loss));
    say("loss-more", known(run.loss) ? `in step ${count(run.loss_step)}` : "no peer has reported one yet");
    const filled = run.target ? run.batch / run.target : 0;
    say("batch", run.target ? `${Math.min(100, Math.floor(filled * 100))} %` : "–");
    const due = run.phase === "averaging" ? "it is being averaged" : known(run.seconds_to_step) ? `next step in ${span(run.seconds_to_step)}` : "nobody computes";
    say("batch-more", run.target ? `${count(run.batch)} of ${count(run.target)} samples; ${due}` : "");
    bar("batch-bar", filled);
    say("rate", short(run.rate));
    const both = (run.accumulating || 0) + (run.averaging || 0);
    say("rate-more", both ? `limited by ${run.accumulating >= run.averaging ? "computing" : "averaging"}: ${span(run.accumulating)} of computing and ${span(run.averaging)} of averaging in the last step` : "");
    bar("computing", both ? run.accumulating / both : 0);
    bar("averaging", both ? run.averaging / both : 0);
    const isOver = run.steps && run.step >= run.steps;
    say("left", isOver ? "complete" : known(run.seconds_left) ? span(run.seconds_left) : run.steps ? "–" : "no end");
    say("left-more", isOver ? "all steps are made" : known(run.seconds_left) ? `at the present speed: ${moment(run.at + run.seconds_left)}` : run.steps ? "known after some steps" : "the run goes on until it is stopped");
  }

  function showAge() {
    const seconds = (performance.now() - state.heard) / 1000;
    const isStale = seconds > STALE_SECONDS;
    document.body.classList.toggle("is-stale", isStale);
    const banner = at("stale");
    if (isStale) {
      const words = `These figures are old: there has been no news for ${span(seconds)}. The peer that serves this page may be down or restarting; the page tries on by itself.`;
      if (banner.hidden || Math.round(seconds) % 10 === 0) banner.textContent = words;
    }
    banner.hidden = !isStale;
    say("fresh", isStale ? `stale for ${span(seconds)}` : state.isConnected ? "live" : "connecting");
  }

  function showSpark() {
    const points = state.points.filter((one) => known(one[1])).slice(-60);
    const place = at("spark");
    place.replaceChildren();
    if (points.length < 2) return;
    const losses = points.map((one) => one[1]), low = Math.min(...losses), high = Math.max(...losses);
    const path = points.map((one, i) => `${i ? "L" : "M"}${(i / (points.length - 1) * 100).toFixed(2)} ${(19 - (one[1] - low) / (high - low || 1) * 18).toFixed(2)}`);
    place.append(drawn("path", { d: path.join("") }));
  }

  // ---- charts

  const X = { step: (one) => one[0], samples: (one) => one[2], time: (one) => one[3] };
  const xWords = { step: (v) => `step ${count(v)}`, samples: (v) => `${short(v)} samples`, time: (v) => span(v) };

  function ticks(low, high, most) {
    const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let one = Math.ceil(low / step - 1e-9); one * step <= high + step * 1e-6 && found.length < 30; one += 1) found.push(one * step);
    return found;
  }

  function timeTicks(low, high, most) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    const rough = (high - low) / Math.max(1, most);
    const step = steps.find((one) => one >= rough) || Math.ceil(rough / 86400) * 86400;
    const found = [];
    for (let one = Math.ceil(low / step); one * step <= high && found.length < 30; one += 1) found.push(one * step);
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
      for (const one of [1, 2, 5]) { const v = one * 10 ** power; if (v >= low * 0.999 && v <= high * 1.001) found.push(v); }
    if (found.length < 2) return ticks(low, high, 4).filter((one) => one > 0);
    return found.length > 9 ? found.filter((v) => Math.abs(Math.log10(v) % 1) < 1e-9) : found;
  }

  function smoothed(values, weights) {
    const all = weights.reduce((a, b) => a + b, 0), reach = Math.max(1, all / 80);
    // From both sides, or the curve would lag behind where it falls.
    const sums = values.map(() => [0, 0]);
    for (const backwards of [false, true]) {
      let sum = 0, weight = 0;
      for (let turn = 0; turn < values.length; turn += 1) {
        const i = backwards ? values.length - 1 - turn : turn, keep = Math.exp(-weights[i] / reach);
        sum = sum * keep + values[i] * weights[i];
        weight = weight * keep + weights[i];
        sums[i][0] += sum - (backwards ? values[i] * weights[i] : 0);
        sums[i][1] += weight - (backwards ? weights[i] : 0);
      }
    }
    return sums.map(([sum, weight]) => sum / weight);
  }

  // Not at first: an observer calls for a size that is drawn already.
  function whenResized(place, draw) {
    let size = null;
    new ResizeObserver(([{ contentRect: { width, height } }]) => {
      const before = size;
      size = `${Math.round(width)} ${Math.round(height)}`;
      if (before !== null && before !== size) draw();
    }).observe(place);
  }

  class Chart {
    constructor(id, options) {
      this.place = at(`${id}-chart`); this.reading = at(`${id}-reading`); this.options = options; this.cursor = null;
      this.place.addEventListener("pointermove", (event) => this.point(event));
      this.place.addEventListener("pointerleave", () => this.move(null));
      this.place.addEventListener("blur", () => this.move(null));
      this.place.addEventListener("keydown", (event) => this.key(event));
      whenResized(this.place, () => this.draw());
    }
    draw() {
      const { value, className, isLog, smooth, unit } = this.options;
      const box = this.place.getBoundingClientRect(), width = Math.max(120, box.width), height = Math.max(80, box.height);
      const log = isLog() && state.points.some((one) => value(one) > 0);
      const rows = state.points.filter((one) => known(value(one)) && (!log || value(one) > 0));
      if (rows.length < 2) {
        this.place.replaceChildren(element("p", rows.length ? "One point so far; two make a curve." : "Nothing to draw yet: the curve begins with the run's first step.", "empty"));
        this.at = null; this.say(); return;
      }
      const xs = rows.map(X[chosen.by]), raw = rows.map(value);
      const soft = smooth() && rows.length > 8 ? smoothed(raw, rows.map((one) => one[6])) : null;
      const main = soft || raw;
      let low = Math.min(...raw), high = Math.max(...raw);
      if (soft && !log && rows.length > 40) { const sorted = [...raw].sort((a, b) => a - b); low = Math.min(sorted[Math.floor(sorted.length * 0.005)], ...soft); high = Math.max(sorted[Math.ceil(sorted.length * 0.995) - 1], ...soft); }
      if (this.options.fromZero) low = 0;
      if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low = log ? low / 1.2 : low - pad; high += pad; }
      else if (!log) { const pad = (high - low) * 0.06; high += pad; if (!this.options.fromZero) low -= pad; }
      const first = xs[0], last = xs[xs.length - 1] > first ? xs[xs.length - 1] : first + 1;
      const yTicks = log ? logTicks(low, high) : ticks(low, high, Math.max(2, height / 60));
      const labels = yTicks.map((v) => this.options.tick(v, yTicks));
      const left = 12 + 6.6 * Math.max(...labels.map((one) => one.length)), right = 12, top = 8, bottom = 24;
      const place = log ? Math.log : (v) => v;
      const x = (v) => left + (v - first) / (last - first) * (width - left - right);
      const y = (v) => top + (1 - (place(v) - place(low)) / (place(high) - place(low))) * (height - top - bottom);
      const clip = (v) => Math.max(top, Math.min(height - bottom, y(v)));
      const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      yTicks.forEach((v, i) => { const py = y(v); if (py < top - 1 || py > height - bottom + 1) return; svg.append(drawn("line", { x1: left, x2: width - right, y1: py, y2: py, class: "grid" }), drawn("text", { x: left - 7, y: py + 4, "text-anchor": "end" }, labels[i])); });
      const xTicks = (chosen.by === "time" ? timeTicks : ticks)(first, last, Math.max(2, width / (chosen.by === "time" ? 90 : 70))).filter((v) => chosen.by !== "step" || Number.isInteger(v));
      for (const v of xTicks) { const px = x(v); svg.append(drawn("text", { x: px, y: height - 7, "text-anchor": px > width - 40 ? "end" : "middle" }, chosen.by === "time" ? span(v) : short(v))); }
      const path = (values) => values.map((v, i) => `${i ? "L" : "M"}${x(xs[i]).toFixed(1)} ${clip(v).toFixed(1)}`).join("");
      svg.append(drawn("path", { d: `${path(main)}L${x(xs[xs.length - 1]).toFixed(1)} ${height - bottom}L${left} ${height - bottom}Z`, class: `area ${className}` }));
      if (soft) svg.append(drawn("path", { d: path(raw), class: `faint ${className}` }));
      svg.append(drawn("path", { d: path(main), class: `line ${className}` }));
      this.mark = drawn("g", {});
      svg.append(this.mark);
      this.place.replaceChildren(svg);
      this.at = { rows, xs, main, x, y: clip, top, bottom: height - bottom, left, width };
      const lowest = main.reduce((best, v, i) => v < main[best] ? i : best, 0);
      this.place.setAttribute("aria-label", `${this.options.name} by ${chosen.by}: from ${this.options.words(main[0])} to ${this.options.words(main[main.length - 1])}${unit}, lowest ${this.options.words(main[lowest])} at ${xWords[chosen.by](xs[lowest])}. Left and right arrow keys read single points.`);
      if (this.cursor !== null) this.move(Math.min(this.cursor, rows.length - 1));
      else this.say();
    }
    point(event) {
      if (!this.at) return;
      const px = event.clientX - this.place.getBoundingClientRect().left;
      let best = 0;
      this.at.xs.forEach((v, i) => { if (Math.abs(this.at.x(v) - px) < Math.abs(this.at.x(this.at.xs[best]) - px)) best = i; });
      this.move(best);
    }
    key(event) {
      if (!this.at) return;
      const most = this.at.rows.length - 1, now = this.cursor === null ? most : this.cursor, page = Math.max(1, Math.round(most / 20));
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: 0, End: most, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.move(to === null ? null : Math.max(0, Math.min(most, to)));
    }
    move(cursor) {
      this.cursor = cursor;
      if (this.at) {
        this.mark.replaceChildren();
        if (cursor !== null) {
          const px = this.at.x(this.at.xs[cursor]);
          this.mark.append(drawn("line", { x1: px, x2: px, y1: this.at.top, y2: this.at.bottom, class: "cross" }), drawn("circle", { cx: px, cy: this.at.y(this.at.main[cursor]), r: 4.5, class: `dot ${this.options.className}` }));
        }
      }
      this.say();
    }
    say() {
      const place = this.cursor === null || !this.at ? null : this.cursor;
      let words = "";
      if (place !== null) {
        const one = this.at.rows[place], raw = this.options.value(one);
        const peers = one[5] ? `, ${one[5] === 1 ? "1 peer" : `${count(one[5])} peers`}` : "";
        const mean = one[6] > 1 ? `, mean of ${count(one[6])} steps` : "";
        words = `step ${count(one[0])}, ${short(one[2])} samples, after ${span(one[3])}: ${this.options.words(raw)}${this.options.unit}${this.at.main[place] !== raw ? ` (smoothed ${this.options.words(this.at.main[place])})` : ""}${peers}${mean}`;
      }
      if (this.reading.textContent !== words) this.reading.textContent = words;
    }
  }

  const lossTick = (v, all) => {
    const step = all.length > 1 ? Math.min(...all.slice(1).map((one, i) => Math.abs(one - all[i]))) : Math.abs(v);
    if (v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3)) return v.toExponential(0);
    return v.toFixed(Math.max(0, Math.min(4, Math.ceil(-Math.log10(step || 1) - 1e-9))));
  };
  const charts = [
    new Chart("loss", { name: "Loss of the run", unit: "", className: "", value: (one) => one[1], words: lossWords, tick: lossTick, isLog: () => chosen.scale === "log", smooth: () => chosen.curve === "smoothed" }),
    new Chart("speed", { name: "Samples per second", unit: " samples per second", className: "warm", fromZero: true, value: (one) => one[4], words: short, tick: (v) => short(v), isLog: () => false, smooth: () => chosen.curve === "smoothed" }),
  ];
  for (const input of document.querySelectorAll(".controls input"))
    input.addEventListener("change", () => { chosen[input.name] = input.value; charts.forEach((one) => one.draw()); });
  addEventListener("beforeprint", () => charts.forEach((one) => one.draw()));

  // ---- tables and lists

  const cell = (text, className) => element("td", text, className);
  // A name ends with the end of the peer's key, which alone proves something.
  const split = (who) => { const at = who.lastIndexOf(" …"); return at > 0 ? [who.slice(0, at), who.slice(at + 1)] : [who, ""]; };
  const named = (who) => {
    const made = cell(undefined, "who"), [name, key] = split(who);
    made.append(name);
    if (key) made.append(" ", element("span", key, "key"));
    return made;
  };
  const ROLES = { trains: "trains", auxiliary: "helps", keeps: "keeps", "": "–" };
  const REACHES = { none: "not linked", direct: "directly", punched: "punched", relayed: "by a relay" };

  function showPeople() {
    const { rows, more } = state.people;
    const training = rows.filter((one) => one.role === "trains" && !one.ignored).length;
    say("people-more", `${count(rows.length + more)} ${rows.length + more === 1 ? "peer" : "peers"}, ${count(training)} of them ${training === 1 ? "trains" : "train"}${more ? `; ${count(more)} more than are shown` : ""}`);
    const most = Math.max(...rows.map((one) => one.hour || 0));
    fill("people", rows, (one) => {
      const line = element("tr", undefined, `${one.own ? "own" : ""}${one.ignored || one.reach === "none" ? " off" : ""}`);
      const who = named(one.who);
      if (one.own) who.append(element("span", "this peer", "tag"));
      if (one.ignored) who.append(element("span", "does not count", "tag"));
      if (one.device) who.append(element("span", one.device, "tag"));
      const hour = cell(undefined, "num");
      if (known(one.hour) && most) {
        const meter = element("span", undefined, "meter"), fill = element("i");
        fill.style.width = `${one.hour / most * 100}%`;
        meter.append(fill);
        hour.append(meter);
      }
      hour.append(element("span", percent(one.hour), "share"));
      const reach = cell(one.own ? "" : (REACHES[one.reach] || one.reach) + (known(one.trip) ? `, ${trimmed(one.trip, 2)} ms` : ""), "low");
      line.append(who, cell(ROLES[one.role] || one.role, "mid"), reach, cell(span(one.here), "num low"), cell(one.role === "keeps" ? "" : short(one.rate), "num"), hour);
      return line;
    });
  }

  function showBoard() {
    const board = state.board;
    at("board").parentElement.hidden = !board || !(board.people.length || board.helpers.length);
    if (!board || !(board.people.length || board.helpers.length)) {
      say("board-more", "Nobody can be credited yet: no step of several people is on record here.");
      due.delete("more of board");
      at("board").tBodies[0].replaceChildren();
      return;
    }
    const line = ([rank, who, samples, alone, steps, averaged, seconds, devices, confirming, witnesses], helps) => {
      const row = element("tr"), name = named(who);
      if (devices > 1) name.append(element("span", `${count(devices)} devices`, "tag"));
      if (helps) name.append(element("span", "helps", "tag"));
      row.append(cell(helps ? "" : count(rank), "num"), name, cell(helps ? "" : count(samples + alone), "num"), cell(count(steps), "num low"), cell(bytes(averaged), "num mid"), cell(span(seconds), "num low"), cell(witnesses ? `${count(confirming)} of ${count(witnesses)}` : "–", "num"));
      return row;
    };
    fill("board", [...board.people.map((one) => [one, false]), ...board.helpers.map((one) => [one, true])], ([one, helps]) => line(one, helps));
    const writers = board.records === 1 ? "the signed record of 1 peer" : `the signed records of ${count(board.records)} peers`;
    say("board-more", `Proof: added up from ${writers}, over ${count(board.steps)} steps, of which this peer has seen ${count(board.seen)} itself. A step counts as most of its other members confirm it. Witnesses are the others who recorded a step with this person, and those of them who confirm all that is credited. “potluck leaderboard --check” adds the same records up again.`);
  }

  function showEvents() {
    at("events-card").hidden = state.events === null;
    const events = state.events || [];
    if (!events.length) { at("events").replaceChildren(element("li", "Nothing has happened yet.", "small")); return; }
    at("events").replaceChildren(...events.map(([when, words]) => {
      const line = element("li"), time = element("time", moment(when));
      const date = new Date(when * 1000);
      if (!Number.isNaN(date.getTime())) time.dateTime = date.toISOString();
      line.append(time, element("span", words));
      return line;
    }));
  }

  function showCheckpoints() {
    const rows = [...state.checkpoints].reverse().slice(0, 5).map(([step, when, size]) => {
      const line = element("li");
      line.append(element("span", `step ${count(step)}, ${bytes(size)}`), element("span", moment(when), "small"));
      return line;
    });
    at("checkpoints").replaceChildren(...(rows.length ? rows : [element("li", "none by this peer yet", "small")]));
  }

  function showDefinition() {
    const pairs = (rows) => rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
    const found = state.definition;
    at("facts").replaceChildren(...(found ? pairs(found.facts) : [element("dt", "not known yet")]));
    at("costs").replaceChildren(...(found && found.costs.length ? pairs(found.costs) : [element("dt", "not known yet")]));
  }

  function showJoin() {
    const join = state.join;
    at("join-card").hidden = !join;
    if (!join) return;
    say("join-how", join.closed ? "The run is closed: people who may log in take part, with this invite." : "The run is open: everybody with this invite can take part. Ctrl-C ends it at any time.");
    say("command", `potluck join ${join.invite}`);
    const size = join.qr.length, dark = [];
    join.qr.forEach((row, y) => { for (let x = 0; x < size; x += 1) if (row[x] === "1") { const from = x; while (row[x + 1] === "1") x += 1; dark.push(`M${from} ${y}h${x - from + 1}v1H${from}z`); } });
    const svg = drawn("svg", { viewBox: `0 0 ${size} ${size}`, "shape-rendering": "crispEdges", "aria-hidden": "true" });
    svg.append(drawn("path", { d: dark.join(""), fill: "#000" }));
    at("qr").replaceChildren(svg);
    at("qr").hidden = !size; // too long for a code
  }

  at("copy").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(at("command").textContent); say("copied", "copied"); }
    catch { getSelection().selectAllChildren(at("command")); say("copied", "selected: copy it with Ctrl-C"); }
  });

  // ---- the map of the last round

  const MOST_LETTERS = 15;

  // A name on the map, as much of it as has room; with what follows it, if both have. Letters are as
  // wide as the browser draws them, so the line must be on the page.
  function sayWithin(room, line, name, following) {
    const letters = [...name];
    const first = (shown) => shown < letters.length ? `${letters.slice(0, shown - 1).join("")}…` : name;
    const width = (words) => { line.textContent = words; return line.getComputedTextLength(); };
    let shown = Math.min(letters.length, MOST_LETTERS);
    if (following && width(first(shown) + following) <= room) return;
    let taken = width(first(shown));
    while (taken > room && shown > 2) {
      shown = Math.max(2, Math.min(shown - 1, Math.floor(shown * room / taken)));
      taken = width(first(shown));
    }
  }

  function showRound() {
    const round = state.round, place = at("map");
    if (!round || round.members.length < 2) {
      say("round-more", "");
      place.replaceChildren(element("p", "No round with others yet.", "empty"));
      return;
    }
    const members = round.members, box = place.getBoundingClientRect();
    const wide = Math.max(240, box.width), high = Math.max(240, box.height), cx = wide / 2, cy = high / 2;
    const few = members.length <= 24, r = few ? Math.max(50, Math.min(high / 2 - 52, wide / 2 - (wide < 420 ? 96 : 138))) : Math.min(high, wide) / 2 - 14;
    const spot = (i) => { const turn = i / members.length * 2 * Math.PI - Math.PI / 2; return [cx + r * Math.cos(turn), cy + r * Math.sin(turn), turn]; };
    const svg = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" });
    const most = Math.max(...members.map((one) => one[2] || 0)) || 1;
    // With many members the largest parts stand for all of them: a line for each pair is a blot.
    const reducers = members.map((one, i) => [i, one[2] || 0]).filter((one) => one[1] > 0).sort((a, b) => b[1] - a[1]).slice(0, few ? 24 : 3);
    for (const [i, part] of reducers) {
      const [x1, y1] = spot(i);
      const lines = members.map((other, j) => {
        if (j === i || !other[1]) return "";
        const [x2, y2] = spot(j);
        return `M${x2.toFixed(1)} ${y2.toFixed(1)}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${x1.toFixed(1)} ${y1.toFixed(1)}`;
      });
      svg.append(drawn("path", { d: lines.join(""), class: "edge", "stroke-width": (few ? 0.4 + 3 * part / most : 0.7).toFixed(2), "stroke-opacity": (few ? 0.12 + 0.3 * part / most : 0.3).toFixed(2) }));
    }
    const names = [];
    members.forEach(([who, samples, part], i) => {
      const [x, y, turn] = spot(i), size = few ? 4 + 12 * Math.sqrt((part || 0) / most) : Math.max(2.2, Math.min(6, r * 2.6 / members.length)) * (0.6 + 0.4 * Math.sqrt((part || 0) / most));
      svg.append(drawn("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: size.toFixed(1), class: part ? "node" : "node idle" }));
      if (!few) return;
      const side = Math.cos(turn), end = Math.abs(side) < 0.2 ? "middle" : side > 0 ? "start" : "end";
      const px = x + Math.cos(turn) * (size + 6), py = y + Math.sin(turn) * (size + 12) + 4;
      const [said, key] = split(who), line = drawn("text", { x: px.toFixed(1), y: py.toFixed(1), "text-anchor": end });
      const room = { start: wide - px, end: px, middle: 2 * Math.min(px, wide - px) }[end];
      svg.append(line);
      names.push(() => sayWithin(room, line, said || key, members.length <= 12 && wide >= 420 ? ` · ${percent(part)}` : ""));
    });
    place.replaceChildren(svg);
    names.forEach((draw) => draw());
    const averaging = members.filter((one) => one[2] > 0).length;
    say("round-more", `step ${count(round.step)}: ${count(averaging)} of ${count(members.length)} members averaged a part for the others${round.of_many ? "; one group of several" : ""}${few ? "" : "; lines lead to the three largest parts"}`);
  }

  whenResized(at("map"), () => { if (state.round) showRound(); });

  // ---- news

  let source = null;
  function connect() {
    if (source) source.close();
    source = new EventSource(`/events?after=${encodeURIComponent(state.mark || "")}`);
    source.onopen = () => { state.isConnected = true; };
    source.onmessage = (event) => { state.isConnected = true; take(JSON.parse(event.data)); };
    source.onerror = () => { state.isConnected = false; if (source.readyState === EventSource.CLOSED) setTimeout(connect, RECONNECT_MS); };
  }

  try { take(JSON.parse(at("data").textContent)); } catch { say("fresh", "connecting"); }
  setInterval(showAge, 1000);
  connect();

  // ---- the key of a login link: behind the #, so that no server's log has it

  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {
    history.replaceState(null, "", location.pathname);
    fetch("/login", { method: "POST", headers: { authorization: `Bearer ${key}` } }).then(async (answer) => {
      if (answer.ok) return location.reload();
      say("login", await answer.text());
      at("login").hidden = false;
    });
  }
})();
