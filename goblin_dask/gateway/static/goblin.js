// Fills the monitoring page from goblin/status.json. Text of the grid is only ever set as text, never as markup.
"use strict";

const ROWS = 200;
const period = Number(document.body.dataset.period);
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
let lastAnswer = 0;

// --- numbers ----------------------------------------------------------------------------------------------------
function short(value) {
  const digits = value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : value >= 0.01 ? 2 : 4;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? short(value) : number.format(value)} ${units[unit]}`;
}

function work(flops) {
  const units = ["MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"];
  let value = flops / 1e6, unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${short(value)} ${units[unit]}`;
}

function span(seconds) {
  if (seconds < 1) return `${number.format(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

const percent = (part, whole) => (whole > 0 ? `${short((100 * part) / whole)} %` : "–");
const many = (count, one, more) => `${number.format(count)} ${count === 1 ? one : more}`;

// --- small pieces of the page -----------------------------------------------------------------------------------
function text(id, value) {
  const node = byId(id);
  if (node.textContent !== value) node.textContent = value;
}

function cell(content, kind) {
  const node = document.createElement("td");
  if (kind) node.className = kind;
  if (content instanceof Node) node.append(content); else node.textContent = content;
  return node;
}

function count(value, bad) {
  return cell(number.format(value), `n${value === 0 ? " nil" : bad ? " bad" : ""}`);
}

function track(parts) {
  const bar = document.createElement("div");
  bar.className = "track";
  for (const [kind, share] of parts) {
    const piece = document.createElement("i");
    piece.className = kind;
    piece.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
    bar.append(piece);
  }
  return bar;
}

function meter(parts, label) {
  const box = document.createElement("div");
  const words = document.createElement("span");
  box.className = "meter";
  words.textContent = label;
  box.append(track(parts), words);
  return box;
}

function rows(table, list, make) {
  const lines = list.map((item) => {
    const line = document.createElement("tr");
    line.append(...make(item));
    return line;
  });
  document.querySelector(`#${table} tbody`).replaceChildren(...lines);
  byId(table).hidden = list.length === 0;
  byId(`no-${table}`).hidden = list.length > 0;
}

// --- charts -----------------------------------------------------------------------------------------------------
function model(name) {
  for (const document_ of Bokeh.documents) {
    const found = document_.get_model_by_name(name);
    if (found) return found;
  }
  return null;
}

function fill(name, data) {
  const source = model(name);
  if (source) source.data = data;
}

const WINDOW = 600_000; // milliseconds of history that are shown at most

function series(name, time, columns) {
  const x = model(`${name}-x`), y = model(`${name}-y`);
  if (!x || time.length === 0) return;
  const end = time[time.length - 1];
  x.setv({ start: Math.min(end - 10_000, Math.max(time[0], end - WINDOW)), end });
  const top = Math.max(...Object.values(columns).map((column) => Math.max(...column)));
  y.end = top > 0 ? top * 1.15 : 1;
  fill(name, { time, ...columns });
}

function bars(name, factors, counts, texts, colours) {
  const names = model(`${name}-names`), range = model(`${name}-range`);
  if (!names) return;
  const order = [...factors].reverse();
  if (order.join() !== names.factors.join()) names.factors = order;
  const longest = Math.max(...texts.map((label) => label.length));
  const end = Math.max(10, ...counts) * (1.12 + longest / 60); // room for the words behind the longest bar
  if (end > range.end || end < range.end / 2) range.end = end;
  fill(name, { name: factors, count: counts, text: texts, colour: colours });
}

const shown = new Map();
function colours(name) { // as the server chose them
  if (!shown.has(name)) {
    const data = model(name).data;
    shown.set(name, new Map(Array.from(data.name, (key, i) => [key, data.colour[i]])));
  }
  return shown.get(name);
}

function drawCharts(status) {
  const history = status.history;
  const zone = new Date().getTimezoneOffset() * 60;
  const time = history.time.map((moment) => (moment - zone) * 1000);
  series("flops", time, { gflops: history.gflops });
  series("bytes", time, { down: history.down, up: history.up });

  const states = Object.keys(status.tasks);
  const counts = states.map((state) => Math.max(0, status.tasks[state]));
  const palette = colours("tasks");
  bars("tasks", states, counts, counts.map((n) => number.format(n)), states.map((s) => palette.get(s)));

  const known = new Map([...colours("methods").keys()].map((name) => [name, null]));
  for (const method of status.methods) known.set(method.method, method);
  const methods = [...known.keys()];
  const cpu = status.totals.check_seconds + status.totals.compute_seconds;
  bars(
    "methods",
    methods,
    methods.map((name) => known.get(name)?.accepted ?? 0),
    methods.map((name) => {
      const method = known.get(name);
      if (!method) return "not used";
      const rejected = method.rejected ? `, ${number.format(method.rejected)} rejected` : "";
      const share = percent(method.check_seconds, cpu);
      return `${number.format(method.accepted)}${rejected} · ${share} ${innerWidth < 800 ? "CPU" : "of CPU time"}`;
    }),
    methods.map(() => "#3a8f4f"),
  );
}

// --- tables -----------------------------------------------------------------------------------------------------
function drawJobs(jobs) {
  rows("jobs", jobs, (job) => {
    const all = Math.max(1, job.submitted);
    const waiting = Math.max(0, job.submitted - job.accepted - job.failed - job.active);
    const bar = meter(
      [["done", job.accepted / all], ["lost", job.failed / all], ["hand", job.active / all]],
      `${number.format(Math.floor((100 * job.accepted) / all))} % of ${number.format(job.submitted)}`,
    );
    return [
      cell(job.id || "(none)", "name"), cell(bar), count(job.accepted), count(job.active), count(waiting),
      count(job.failed, true), cell(short(job.flops / 1e12), "n"), cell(span(job.seconds), "n"),
    ];
  });
}

function drawWorkers(workers) {
  const order = { volunteer: 0, validator: 1 };
  const sorted = [...workers].sort(
    (a, b) => order[a.role] - order[b.role] || b.accepted - a.accepted || (a.id < b.id ? -1 : 1));
  const fastest = Math.max(1, ...workers.map((worker) => worker.flops));
  rows("workers", sorted.slice(0, ROWS), (worker) => {
    const state = document.createElement("span");
    state.className = `pill ${worker.state}`;
    state.textContent = worker.state;
    const validator = worker.role === "validator";
    const device = `${worker.device} · ${many(worker.threads, "thread", "threads")}`;
    const speed = worker.flops > 0
      ? meter([["speed", worker.flops / fastest]], `${short(worker.flops / 1e9)}${worker.measured ? "" : " (stated)"}`)
      : "not known yet";
    const cache = worker.cache_limit > 0
      ? meter([["cache", worker.cache / worker.cache_limit]], `${bytes(worker.cache)} / ${bytes(worker.cache_limit)}`)
      : "none";
    const verdicts = validator
      ? [cell(many(worker.checked, "check", "checks"), "n"), cell("", "n"), cell("", "n"), cell("", "n")]
      : [count(worker.accepted), count(worker.wrong, true), count(worker.unproven), count(worker.failed)];
    return [
      cell(worker.id, "name"), cell(state), cell(validator ? `validator · ${device}` : device, "device"),
      cell(speed), cell(cache), count(worker.leases), ...verdicts, cell(span(worker.seconds), "n"),
    ];
  });
  const more = workers.length - ROWS;
  byId("more-workers").hidden = more <= 0;
  if (more > 0) text("more-workers", `… and ${number.format(more)} more; all of them are in status.json.`);
}

function drawFigures(status) {
  const { tasks, totals, history } = status;
  const rate = history.gflops.length ? history.gflops[history.gflops.length - 1] : 0;
  const rejected = status.methods.reduce((sum, method) => sum + method.rejected, 0);
  const checks = status.methods.reduce((sum, method) => sum + method.accepted + method.rejected, 0);
  text("f-volunteers", number.format(status.volunteers));
  text("f-validators", `${many(status.validators, "validator", "validators")}, ${many(status.labs, "laboratory", "laboratories")}`);
  text("f-flops", short(rate));
  text("f-total", `${work(totals.flops)} in all`);
  text("f-accepted", number.format(tasks.accepted));
  text("f-rejected", `${number.format(rejected)} rejected, ${number.format(totals.quarantined)} in quarantine`);
  text("f-share", percent(totals.check_seconds, totals.check_seconds + totals.compute_seconds));
  text("f-checks", many(checks, "check", "checks"));
  text("f-moved", bytes(totals.bytes_to_volunteers + totals.bytes_from_volunteers));
  text("f-relayed", `${bytes(totals.bytes_relayed)} through this gateway`);
  text("f-latency", tasks.accepted ? span(status.latency) : "–");
  text("f-queued", `${number.format(tasks.queued)} queued`);
}

// --- polling ----------------------------------------------------------------------------------------------------
async function refresh() {
  try {
    const answer = await fetch("goblin/status.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the gateway answers ${answer.status}`);
    const status = await answer.json();
    lastAnswer = Date.now();
    drawFigures(status);
    drawJobs(status.jobs);
    drawWorkers(status.workers);
    drawCharts(status);
    byId("connection").className = "";
    text("connection", `gateway up for ${span(status.uptime)}`);
    document.body.dataset.fresh = String(status.time);
  } catch (error) {
    const silent = lastAnswer ? ` for ${span((Date.now() - lastAnswer) / 1000)}` : "";
    byId("connection").className = "lost";
    text("connection", `no answer from the gateway${silent}; trying again`);
  }
  setTimeout(refresh, document.hidden ? 5 * period : period);
}

async function start() {
  text("address", location.host);
  const items = await (await fetch("goblin/charts.json")).json();
  for (const item of items) await Bokeh.embed.embed_item(item);
  await refresh();
}

start();
