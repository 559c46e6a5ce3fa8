// Draws /state.json once a second. No library and no build step. The token, if one is needed, is given behind '#' in
// the page's address, which browsers do not send.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const PHASES = ["decide", "edit", "plan", "settle", "computed again"];
const MARKS = { losses: "loss-mark", recoveries: "recovery-mark" };

function make(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function element(name, text) {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}

function show(id, ...nodes) {
  document.getElementById(id).replaceChildren(...nodes);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "not known";
  if (seconds < 100) return seconds.toFixed(seconds < 10 ? 3 : 1) + " s";
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

function figures(status) {
  const { progress, history } = status;
  const rows = [];
  if (progress) {
    rows.push(["step", progress.target ? `${progress.step} of ${progress.target}` : progress.step]);
    rows.push(["a step", duration(progress.mean_step_s)], ["last step", `${duration(progress.ago_s)} ago`]);
    rows.push(["left", duration(progress.left_s)]);
    if (progress.loss !== null) rows.push(["loss", progress.loss.toPrecision(6)]);
  }
  rows.push(["members", `${status.members.length} of ${Object.keys(status.ranks).length}`]);
  rows.push(["generation", status.generation.decided]);
  rows.push(["losses", history.losses], ["recoveries", history.recoveries], ["MTTR", duration(history.mttr_s)]);
  rows.push(["goodput", history.goodput === null ? "not known" : (100 * history.goodput).toFixed(2) + " %"]);
  rows.push(["lost time", duration(Object.values(history.lost_s).reduce((sum, each) => sum + each, 0))]);
  const loads = status.expert_loads;
  if (loads) rows.push(["tokens, busiest rank", `${loads.imbalance.toFixed(2)} × mean`]);
  show("figures", ...rows.map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
}

// Pipelines are rows; a segment is as wide as its share of the units. A rank is a square in its cell.
function topology(status, drawn) {
  if (!drawn) return show("topology", element("p", "drawn after the first step"));
  const [width, rowHeight, side] = [1160, 76, 22];
  const cells = new Map(drawn.cells.map((cell) => [cell.cell, cell]));
  const replicas = [...new Set(drawn.segments.map((segment) => segment.replica))].sort((a, b) => a - b);
  const placed = new Map();
  const svg = make("svg", { viewBox: `0 0 ${width} ${rowHeight * (replicas.length + 1)}`, role: "img" });
  const [segments, mirrors, ranks] = [make("g", {}), make("g", {}), make("g", {})];
  const square = (rank, x, y) => {
    const standing = (status.ranks[rank] || {}).standing || "lost";
    const group = make("g", { class: "place", "data-rank": rank, "data-standing": standing });
    group.append(make("rect", { class: `rank ${standing}`, x, y, width: side, height: side, rx: 4 }));
    group.append(make("text", { class: "number", x: x + side / 2, y: y + 15 }, rank));
    group.append(make("title", {}, `rank ${rank}: ${standing}`));
    ranks.append(group);
    if (!placed.has(rank)) placed.set(rank, [x + side / 2, y + side / 2]);
  };
  const across = (units) => 70 + (units / drawn.units) * (width - 80);
  replicas.forEach((replica, row) => {
    const y = row * rowHeight + 4;
    segments.append(make("text", { x: 0, y: y + 34 }, `replica ${replica}`));
    const own = drawn.segments.filter((segment) => segment.replica === replica).sort((a, b) => a.first - b.first);
    own.forEach((segment, stage) => {
      const [x, end, cell] = [across(segment.first), across(segment.end), cells.get(segment.cell)];
      const box = { class: "segment", x, y, width: end - x - 4, height: rowHeight - 10, rx: 5 };
      segments.append(make("rect", box));
      const slow = cell && cell.speed_ppm < 1e6 ? `, ${Math.round(cell.speed_ppm / 1e4)}% of speed` : "";
      const rows = cell ? `, ${cell.rows} samples` : "";
      const text = `stage ${stage}: units ${segment.first} to ${segment.end - 1}${rows}${slow}`;
      segments.append(make("text", { x: x + 6, y: y + 14 }, text));
      (cell ? cell.ranks : []).forEach((rank, at) => square(rank, x + 6 + at * (side + 4), y + 26));
    });
  });
  const y = replicas.length * rowHeight + 26;
  segments.append(make("text", { x: 0, y: y + 15 }, "no layers"));
  let at = 0;
  for (const rank of Object.keys(status.ranks).map(Number)) {
    if (!placed.has(rank)) square(rank, 70 + at++ * (side + 4), y);
  }
  const most = Math.max(1, ...drawn.mirrors.map(([, , blocks]) => blocks));
  for (const [owner, mirror, blocks] of drawn.mirrors) {
    const [from, to] = [placed.get(owner), placed.get(mirror)];
    if (!from || !to) continue;
    const [bend, lift] = [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2 + 18 + Math.abs(from[0] - to[0]) / 20];
    const path = make("path", {
      class: "mirror", d: `M${from[0]} ${from[1]} Q${bend} ${lift} ${to[0]} ${to[1]}`, "data-mirror": `${owner}-${mirror}`,
      "stroke-width": 0.5 + (2 * blocks) / most, "stroke-opacity": 0.3 + (0.4 * blocks) / most,
    });
    path.append(make("title", {}, `rank ${mirror} mirrors ${blocks} blocks of rank ${owner}`));
    mirrors.append(path);
  }
  svg.append(segments, mirrors, ranks);
  show("topology", svg);
  document.getElementById("legend").textContent =
    "Violet lines join the owners of state with their mirrors. Red: lost; orange: starting or waiting; gray: done.";
}

// One curve over the job's time, with losses and recoveries as vertical lines.
function chart(id, state, value) {
  const points = state.samples.map((sample) => [sample.at, value(sample), sample.step]).filter(([, y]) => y !== null);
  if (points.length < 2) return show(id, element("p", "drawn after two steps"));
  const [width, height, left, bottom] = [560, 170, 52, 20];
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const spread = high - low || Math.abs(high) || 1;
  const [y0, y1] = [low - spread * 0.05, high + spread * 0.05];
  const x = (at) => left + ((at - x0) / (x1 - x0 || 1)) * (width - left - 6);
  const y = (number) => 6 + ((y1 - number) / (y1 - y0)) * (height - bottom - 12);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const number of [low, (low + high) / 2, high]) {
    svg.append(make("line", { class: "axis", x1: left, x2: width - 6, y1: y(number), y2: y(number) }));
    svg.append(make("text", { x: 0, y: y(number) + 4 }, number.toPrecision(4)));
  }
  // The newest step may be long ago: ages count from now, not from it.
  const label = ([at, , step]) => `step ${step}, ${duration(Math.max(0, state.status.job_s - at))} ago`;
  svg.append(make("text", { x: left, y: height - 4 }, label(points[0])));
  const end = { x: width - 6, y: height - 4, "text-anchor": "end" };
  svg.append(make("text", end, label(points[points.length - 1])));
  const events = { losses: state.status.history.last_losses, recoveries: state.status.history.last_recoveries };
  for (const [kind, found] of Object.entries(events)) {
    for (const event of found.filter((each) => each.at >= x0 && each.at <= x1)) {
      const mark = make("line", { class: MARKS[kind], x1: x(event.at), x2: x(event.at), y1: 2, y2: height - bottom });
      mark.append(make("title", {}, kind === "losses" ? `rank ${event.rank} lost: ${event.cause}` : event.outcome));
      svg.append(mark);
    }
  }
  const path = points.map(([at, number], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(number).toFixed(1)}`);
  svg.append(make("path", { class: "curve", d: path.join(""), "data-points": points.length }));
  show(id, svg);
}

function recoveries(history) {
  const found = history.last_recoveries.slice(-8).reverse();
  if (!found.length) return show("recoveries", element("p", "none"));
  const bars = found.map((one) => ({ one, parts: { ...one.seconds, "computed again": one.repeated_s } }));
  const total = (parts) => Object.values(parts).reduce((sum, each) => sum + each, 0);
  const longest = Math.max(...bars.map(({ parts }) => total(parts))) || 1;
  const svg = make("svg", { viewBox: `0 0 560 ${bars.length * 34 + 20}`, role: "img" });
  bars.forEach(({ one, parts }, row) => {
    const ranks = one.lost.length ? `without rank ${one.lost.join(", ")}` : "";
    const y = row * 34;
    const name = `generation ${one.generation} ${ranks}, step ${one.step} ${one.outcome}: ${duration(total(parts))}`;
    svg.append(make("text", { x: 0, y: y + 12 }, name));
    let x = 0;
    for (const [phase, seconds] of Object.entries(parts)) {
      const [index, width] = [PHASES.indexOf(phase), (seconds / longest) * 550];
      const bar = { class: `phase-${index < 0 ? 5 : index}`, x, y: y + 16, width, height: 12, "data-phase": phase };
      const rect = make("rect", bar);
      rect.append(make("title", {}, `${phase} ${duration(seconds)}`));
      svg.append(rect);
      x += width;
    }
  });
  PHASES.forEach((phase, index) => {
    const [x, y] = [index * 108, bars.length * 34 + 4];
    svg.append(make("rect", { class: `phase-${index}`, x, y, width: 10, height: 10 }));
    svg.append(make("text", { x: x + 14, y: y + 9 }, phase));
  });
  show("recoveries", svg);
}

function draw(state) {
  const { status } = state;
  document.title = `${status.run_id}: ${status.state}`;
  document.getElementById("job").textContent = status.run_id;
  const badge = document.getElementById("state");
  badge.textContent = badge.className = status.state;
  figures(status);
  const short = status.history.protection.short;
  const tolerance = status.tolerance.text || "What can be lost is not known before the first step.";
  document.getElementById("tolerance").textContent = tolerance;
  document.getElementById("tolerance").dataset.short = short;
  document.getElementById("moving").textContent = status.moving;
  topology(status, state.topology);
  chart("times", state, (sample) => sample.seconds);
  chart("losses", state, (sample) => sample.loss);
  recoveries(status.history);
  const lost = status.history.last_losses.slice(-10).reverse();
  show("lost", ...lost.map((loss) => {
    const ago = duration(Math.max(0, status.job_s - loss.at));
    return element("li", `${ago} ago: rank ${loss.rank} on ${loss.host} at step ${loss.step}: ${loss.cause}`);
  }));
  document.body.dataset.generation = status.generation.decided;
  delete document.body.dataset.outdated;
}

// What is drawn is the past: say so where the eye looks first.
function outdated() {
  const badge = document.getElementById("state");
  badge.textContent = "no answer";
  badge.className = "";
  document.title = document.title.replace(/: .*/, "") + ": no answer";
  document.body.dataset.outdated = "yes";
}

async function update() {
  const news = document.getElementById("news");
  try {
    const token = decodeURIComponent(location.hash.replace(/^#(token=)?/, "")); // fails for a lone '%'
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch("state.json", { headers, cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    draw(await answer.json());
    news.textContent = "";
  } catch (error) {
    news.textContent = error instanceof TypeError ? "The launcher does not answer: the job may have ended." : error.message;
    outdated();
  }
  setTimeout(update, 1000);
}

update();
