/* The report: everything is drawn from one block of data in the page, and all of its text is set as text. */
"use strict";
(() => {
  const { css, colour, narrow, plain, element, swatch, draw, faded } = Charts;
  const data = JSON.parse(document.getElementById("payload").textContent);
  const $ = (id) => document.getElementById(id);
  const state = { group: 0, axis: "seconds", log: false, chart: null };
  const group = () => data.groups[state.group];
  const shown = () => group().series.filter((s) => s.shown);
  const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
  const short = (value, digits = 4) => (value === null ? "–" : String(+value.toPrecision(digits)));
  const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

  // Result.

  const COLUMNS = [
    ["best_accuracy", "best", percent, "the highest accuracy measured"],
    ["rounds", "rounds", (v) => short(v, 4), "merges by the server"],
    ["staleness_mean", "staleness", (v) => short(v, 3), "mean staleness of merged updates"],
    ["updates_trained", "trained", (v) => (v === null ? "–" : Math.round(v).toLocaleString("en")), "updates that some merge needed"],
    ["wall_seconds", "real time", (v) => (v === null ? "–" : `${short(v, 3)} s`), "seconds that this computer took"],
  ];

  function outcome(s) {
    const total = s.runs.length;
    const diverged = s.runs.filter((run) => run.diverged_at !== null);
    const bad = diverged.length ? `diverged at round ${Math.min(...diverged.map((run) => run.diverged_at))}` : "";
    if (!group().target) return [percent(s.best_accuracy), bad].filter(Boolean).join("; ");
    const last = Math.max(...s.runs.map((run) => run.seconds || 0));
    if (!s.hits) {
      if (bad) return bad;
      const words = { running: "running, not yet", dropped: "given up", interrupted: "stopped" }[s.runs[0].status] || "not";
      return `${words} by ${short(last, 3)} s`;
    }
    const spread = s.spread === null ? "" : ` ± ${short(s.spread, 2)}`;
    const count = s.hits < total ? `, ${s.hits} of ${total} seeds` : "";
    return `${short(s.hit)}${spread} s${count}${bad ? `; ${bad}` : ""}`;
  }

  function times() {
    const { target, winner, series } = group();
    $("verdict").textContent = group().verdict;
    $("about").textContent = group().about;
    const value = (s) => (target ? s.hit : s.best_accuracy);
    const longest = Math.max(...series.map((s) => value(s) || 0), 1e-12);
    const head = element("tr", {}, element("th", { scope: "col" }, "setting"),
      element("th", { scope: "col" }, target ? `simulated seconds to ${+(100 * target).toPrecision(4)} %` : "best accuracy"),
      ...COLUMNS.map(([, name, , help]) => element("th", { scope: "col", class: "number", title: help }, name)));
    const wanted = $("search").value.toLowerCase();
    const rows = series.map((s, i) => [s, i]).sort(([a], [b]) => a.place - b.place)
      .filter(([s]) => s.name.toLowerCase().includes(wanted));
    const body = rows.map(([s, i]) => {
      const box = element("input", { type: "checkbox", checked: s.shown, "aria-label": `show ${s.name} in the charts` });
      box.addEventListener("change", () => toggle(s, box.checked));
      const best = i === winner;
      const bar = element("span", { class: value(s) === null ? "fill missed" : "fill" });
      bar.style.width = `calc(var(--reach) * ${value(s) === null ? 1 : Math.max(0.008, value(s) / longest)})`;
      const medal = best ? element("span", { class: "medal" }, target ? "★ fastest" : "★ best") : null;
      const chosen = s.chosen ? element("span", { class: "medal" }, "← chosen") : null;
      const name = element("span", { class: "named" }, box, swatch(s.look), element("span", { title: s.name }, s.name), medal, chosen);
      return element("tr", best ? { class: "best" } : {}, element("th", { scope: "row" }, name),
        element("td", { class: "bars" }, element("span", { class: "track" }, bar, element("span", {}, outcome(s)))),
        ...COLUMNS.map(([key, , format]) => element("td", { class: "number" }, format(s[key]))));
    });
    $("times").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
    $("counted").textContent = `${many(rows.length, "setting")}, ${shown().length} shown in the charts`;
    const how = target
      ? "A bar is the time until the measured accuracy first reached the target, mean over seeds ± standard deviation: shorter is better. A hatched bar never got there."
      : "No target accuracy was set, so settings are ranked by the best accuracy measured: longer is better.";
    const rest = series.length > shown().length ? " Tick a setting to show it in the charts below." : "";
    $("times-how").replaceChildren(element("b", {}, "How to read it. "), how + rest);
  }

  function toggle(s, on) {
    s.shown = on;
    chips();
    charts();
    document.querySelectorAll("#times input").forEach((box) => {
      if (box.getAttribute("aria-label") === `show ${s.name} in the charts`) box.checked = on;
    });
    $("counted").textContent = `${shown().length} shown in the charts`;
  }

  function chips() {
    const all = group().series;
    const listed = all.filter((s) => all.length <= 24 || s.shown).sort((a, b) => a.place - b.place);
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.series : null;
    const made = listed.map((s) => {
      const box = element("input", { type: "checkbox", checked: s.shown, "data-series": String(all.indexOf(s)) });
      box.addEventListener("change", () => toggle(s, box.checked));
      return element("label", { class: "chip", title: s.name }, box, swatch(s.look), element("span", {}, s.name));
    });
    $("chips").replaceChildren(element("legend", {}, "Shown"), ...made);
    if (focused !== null) {
      const again = $("chips").querySelector(`input[data-series="${CSS.escape(focused)}"]`);
      if (again) again.focus();
    }
  }

  // Curves.

  function curves() {
    const measured = group().series.some((s) => s.runs.some((run) => run.x.seconds.length));
    $("curves").hidden = $("chips").hidden = !measured;
    if (!measured) return;
    const series = shown();
    const options = { axis: state.axis, log: state.log, spread: $("spread").checked, target: group().target };
    Charts.curves($("accuracy"), series, "accuracy", options);
    Charts.curves($("loss"), series, "loss", options);
    $("log").checked = state.log;
    const without = series.filter((s) => !s.runs.some((run) => run.x[state.axis])).length;
    const notes = [];
    if (without) notes.push(`${many(without, "setting")} without a whole plan cannot be shown on this axis.`);
    if (series.some((s) => s.lean)) notes.push("Plans of very many clients leave out what no merge uses, " +
      'so there are no megabytes and no chart of clients over time; clients.plan_detail = "all" keeps everything.');
    if (data.every > 1) notes.push(`One measurement in ${data.every} is drawn.`);
    $("axis-note").textContent = notes.join(" ");
  }

  function axes() {
    const has = (axis) => group().series.some((s) => s.runs.some((run) => run.x[axis]));
    const words = { seconds: "Simulated seconds", rounds: "Rounds", updates: "Updates", bytes: "Megabytes" };
    const choose = (axis) => {
      state.axis = axis;
      state.log = Charts.wantsLog(shown(), axis);
      curves();
    };
    if (!has(state.axis)) state.axis = "seconds";
    Charts.radios($("axis"), "axis", Object.entries(words).map(([a, text]) => [a, text, !has(a)]), state.axis, choose);
    state.log = Charts.wantsLog(shown(), state.axis);
    $("spread-row").hidden = !group().series.some((s) => s.runs.length > 1);
  }

  // Staleness and participation.

  function staleness() {
    const series = shown().filter((s) => s.staleness);
    $("staleness-box").hidden = !series.length;
    if (!series.length) return;
    const totals = series.map((s) => s.staleness.reduce((a, b) => a + b, 0) || 1);
    const reach = series.map((s, i) => {
      let [seen, last] = [0, 0];
      s.staleness.forEach((count, late) => {
        seen += count;
        if (seen <= 0.995 * totals[i] || late === 0) last = late;
      });
      return Math.min(last + 1, s.staleness.length - 1);
    });
    const most = Math.max(...reach);
    const wide = Math.max(1, Math.ceil((most + 1) / (narrow() ? 12 : 24)));
    const bins = Math.ceil((most + 1) / wide);
    const labels = Array.from({ length: bins }, (_, k) => {
      const [from, to] = [k * wide, Math.min((k + 1) * wide - 1, most)];
      return from === to ? `${from}` : `${from}–${to}`;
    });
    const beyond = series.some((s) => s.staleness.length - 1 > most);
    if (beyond) labels[bins - 1] = `≥ ${(bins - 1) * wide}`;
    const traces = series.map((s, i) => {
      const y = new Array(bins).fill(0);
      s.staleness.forEach((count, late) => { y[Math.min(bins - 1, Math.floor(late / wide))] += count / totals[i]; });
      return {
        type: "bar", x: labels, y, name: plain(s.name), marker: { color: colour(s.look) },
        hovertemplate: "%{fullData.name}<br>staleness %{x}: %{y:.1%}<extra></extra>",
      };
    });
    $("staleness").setAttribute("aria-label", `Staleness of merged updates of ${series.length} settings`);
    draw($("staleness"), traces, {
      barmode: "group", bargap: 0.15, height: narrow() ? 280 : 340,
      xaxis: { title: { text: "staleness (merges missed)", standoff: 8 }, type: "category", tickangle: 0,
        dtick: Math.ceil(bins / (narrow() ? 4 : 9)) },
      yaxis: { title: { text: "share of merged updates", standoff: 8 }, tickformat: ".0%" },
    });
    const means = series.filter((s) => s.staleness_mean !== null).sort((a, b) => a.staleness_mean - b.staleness_mean);
    $("staleness-note").textContent = means.length < 2 ? "" :
      `Means: from ${short(means[0].staleness_mean, 2)} (${means[0].name}) to ${short(means.at(-1).staleness_mean, 2)} (${means.at(-1).name}).`;
  }

  function participation() {
    const series = shown().filter((s) => s.participation);
    $("participation-box").hidden = !series.length;
    $("why-none").hidden = Boolean(series.length || shown().some((s) => s.staleness));
    $("why-none").textContent = shown().length
      ? "There are no plans of these runs: searches for rates and the paper's tables keep none, and a run writes its plan when it ends."
      : "Tick a setting to see it here.";
    if (!series.length) return;
    const each = Math.max(...series.map((s) => s.participation.each));
    $("each").textContent = each > 1 ? `the mean of ${each} clients of like speed` : "a client";
    const traces = series.map((s) => ({
      type: "scatter", mode: "markers", x: s.participation.step.map((x) => 1000 * x), y: s.participation.share,
      name: plain(s.name), marker: { color: faded(colour(s.look), 0.8), symbol: s.look.symbol, size: 7 },
      hovertemplate: "%{fullData.name}<br>%{x:.3g} ms per step: %{y:.2f} of an equal share<extra></extra>",
    }));
    $("participation").setAttribute("aria-label", `Participation against speed of ${series.length} settings`);
    draw($("participation"), traces, {
      height: narrow() ? 280 : 340,
      xaxis: { title: { text: "milliseconds per local step (slower →)", standoff: 8 } },
      yaxis: { title: { text: "participation (1 = equal)", standoff: 8 }, rangemode: "tozero" },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: css("--soft"), width: 1.5, dash: "dash" } }],
    });
  }

  // The chart of clients over time.

  const STALE = () => (Charts.dark()
    ? [[0, "#5aa9f0"], [0.5, "#f2d06b"], [1, "#f0622e"]] : [[0, "#2f7fd0"], [0.5, "#f0bf3c"], [1, "#c23b12"]]);

  /* A colour of the scale for every staleness: Plotly's own mapping of bars warns about each of them. */
  function shade(late, most) {
    const scale = STALE();
    const at = most ? Math.min(late / most, 1) : 0;
    const k = at <= 0.5 ? 0 : 1;
    const part = (at - scale[k][0]) / 0.5;
    const parts = [1, 3, 5].map((i) => {
      const [from, to] = [scale[k], scale[k + 1]].map(([, hex]) => parseInt(hex.slice(i, i + 2), 16));
      return Math.round(from + part * (to - from));
    });
    return `rgb(${parts.join(",")})`;
  }

  function chartChoices() {
    const all = group().series.map((s, i) => [s, i]).filter(([s]) => s.gantt).sort(([a], [b]) => a.place - b.place);
    $("timeline").hidden = !all.length;
    if (!all.length) return;
    if (!all.some(([, i]) => i === state.chart)) state.chart = all[0][1];
    $("gantt-choice").replaceChildren(...all.map(([s, i]) =>
      element("option", { value: String(i), selected: i === state.chart }, `${s.name.slice(0, 80)}, seed ${s.gantt_seed}`)));
  }

  function waits(chart) {
    const busy = chart.clients.map(() => []);
    for (const spans of [chart.jobs, chart.uploads, chart.away]) {
      spans.row.forEach((row, k) => busy[row].push([spans.start[k], spans.end[k]]));
    }
    const found = { row: [], start: [], end: [] };
    busy.forEach((spans, row) => {
      let reach = 0;
      for (const [start, end] of [...spans.sort((a, b) => a[0] - b[0]), [chart.until, chart.until]]) {
        if (start > reach) {
          found.row.push(row);
          found.start.push(reach);
          found.end.push(start);
        }
        reach = Math.max(reach, end);
      }
    });
    return found;
  }

  function ganttChart() {
    const series = group().series[state.chart];
    if (!series || !series.gantt) return;
    const chart = series.gantt;
    const { jobs } = chart;
    const pick = (spans, kept) => ({
      type: "bar", orientation: "h", y: kept.map((k) => spans.row[k]), base: kept.map((k) => spans.start[k]),
      x: kept.map((k) => spans.end[k] - spans.start[k]),
    });
    const every = (spans) => spans.row.map((_, k) => k);
    const used = every(jobs).filter((k) => jobs.late[k] >= 0);
    const vain = every(jobs).filter((k) => jobs.late[k] < 0);
    const most = Math.max(1, ...jobs.late);
    const told = (kept, end) => kept.map((k) => [chart.clients[jobs.row[k]], jobs.version[k], end(k), jobs.start[k], jobs.end[k]]);
    const said = "client %{customdata[0]}, from version %{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]:.4g} to %{customdata[4]:.4g} s<extra></extra>";
    const waiting = waits(chart);
    const traces = [
      { ...pick(waiting, every(waiting)), width: 0.1, name: "waiting", hovertemplate: "waiting<extra></extra>",
        marker: { color: css("--line") } },
      { ...pick(jobs, used), width: 0.68, offset: -0.42, name: "training", hovertemplate: said,
        customdata: told(used, (k) => `staleness ${jobs.late[k]} when merged`),
        marker: { color: used.map((k) => shade(jobs.late[k], most)), line: { color: css("--paper"), width: 0.6 } } },
      { ...pick(jobs, vain), width: 0.68, offset: -0.42, name: "training no merge used", hovertemplate: said,
        customdata: told(vain, () => "no merge used it"),
        marker: { color: css("--card"), line: { color: css("--soft"), width: 0.7 },
          pattern: { shape: "/", fgcolor: css("--soft"), bgcolor: css("--card"), size: 5, solidity: 0.25 } } },
      { ...pick(chart.uploads, every(chart.uploads)), width: 0.16, offset: 0.29, name: "uploading",
        marker: { color: css("--ink") }, hovertemplate: "uploading<extra></extra>" },
    ];
    if (chart.away.row.length) {
      traces.push({ ...pick(chart.away, every(chart.away)), width: 0.3, offset: -0.15, name: "away",
        marker: { color: css("--warn"), opacity: 0.5 }, hovertemplate: "away<extra></extra>" });
    }
    const rows = chart.clients.length;
    traces.push({
      type: "scatter", mode: "lines", name: "merge", hoverinfo: "skip", line: { color: css("--soft"), width: 0.8 },
      opacity: chart.merges.length > 150 ? 0.25 : 0.7,
      x: chart.merges.flatMap((time) => [time, time, null]), y: chart.merges.flatMap(() => [-0.6, rows - 0.4, null]),
    });
    traces.push({  // nothing but the scale of colours
      type: "scatter", mode: "markers", x: [null], y: [null], name: "scale", hoverinfo: "skip",
      marker: {
        color: [0], colorscale: STALE(), cmin: 0, cmax: most, showscale: true,
        colorbar: {
          orientation: "h", y: 1.0, yanchor: "bottom", x: 1, xanchor: "right", len: narrow() ? 0.9 : 0.35, thickness: 10,
          lenmode: "fraction", outlinewidth: 0, tick0: 0, dtick: Math.ceil(most / 5), ticklabelposition: "outside top",
          title: { text: "staleness when merged", side: "top", font: { size: 12 } },
        },
      },
    });
    $("gantt").setAttribute("aria-label", `What ${rows} clients of ${series.name} did over time`);
    draw($("gantt"), traces, {
      barmode: "overlay", height: Math.max(300, 120 + rows * (narrow() ? 17 : 22)),
      margin: { l: 64, r: 14, t: 66, b: 58 }, dragmode: narrow() ? false : "pan",
      xaxis: { title: { text: "simulated seconds", standoff: 20 }, range: [0, chart.first], minallowed: 0, maxallowed: chart.until * 1.01 },
      yaxis: {
        range: [rows - 0.4, -0.6], tickvals: chart.clients.map((_, row) => row), fixedrange: true, showgrid: false, zeroline: false,
        ticktext: chart.clients.map((client) => `client ${client}`), tickfont: { size: narrow() ? 10 : 12 },
      },
    });
    const keys = [
      ["training", `linear-gradient(90deg, ${STALE().map(([, c]) => c).join(", ")})`],
      ["training that no merge used", `repeating-linear-gradient(135deg, ${css("--soft")} 0 1px, ${css("--card")} 1px 5px)`],
      ["uploading", css("--ink")], ["waiting", css("--line")],
      ...(chart.away.row.length ? [["away", css("--warn")]] : []), ["a merge (vertical line)", css("--soft")],
    ];
    const heights = { uploading: "4px", waiting: "3px", "a merge (vertical line)": "1px" };
    $("gantt-keys").replaceChildren(...keys.map(([text, background]) => {
      const box = element("i");
      box.style.background = background;
      if (heights[text]) box.style.height = heights[text];
      return element("li", {}, box, text);
    }));
    const some = rows < chart.of ? `${rows} of ${chart.of} clients are shown, evenly spread by speed` : `all ${chart.of} clients are shown`;
    const part = chart.until < chart.whole ? `, and the first ${short(chart.until, 3)} of ${short(chart.whole, 3)} s` : "";
    $("gantt-note").textContent = `Here ${some}${part}. Drag to move, or use the buttons.`;
  }

  function zoom(how) {
    const chart = group().series[state.chart].gantt;
    const [low, high] = $("gantt").layout.xaxis.range.map(Number);
    const [middle, half] = [(low + high) / 2, (high - low) / 2];
    const wide = { in: half / 2, out: Math.min(half * 2, chart.until / 2), left: half, right: half, all: chart.until / 2 }[how];
    let at = { in: middle, out: middle, left: middle - half, right: middle + half, all: chart.until / 2 }[how];
    at = Math.min(Math.max(at, wide), Math.max(wide, chart.until - wide));
    Plotly.relayout($("gantt"), { "xaxis.range": [at - wide, at + wide] });
  }

  // Data, settings, origin.

  function split() {
    const found = group().split;
    $("data").hidden = !found;
    if (!found) return;
    const classes = found.counts[0].length;
    const clients = found.counts.map((_, i) => i);
    const z = Array.from({ length: classes }, (_, kind) => found.counts.map((row) => row[kind]));
    $("split").setAttribute("aria-label", `Samples of ${classes} classes on ${found.counts.length} clients`);
    draw($("split"), [{
      type: "heatmap", z, x: clients, y: z.map((_, kind) => kind), zmin: 0, xgap: clients.length <= 120 ? 1 : 0, ygap: 1,
      colorscale: Charts.dark() ? [[0, "#1c2026"], [0.5, "#2f77b0"], [1, "#bfe3ff"]] : [[0, "#f3f5f8"], [0.5, "#6fa8d6"], [1, "#08457e"]],
      colorbar: { thickness: 10, outlinewidth: 0, title: { text: "samples", font: { size: 12 } } },
      hovertemplate: "client %{x}, class %{y}: %{z} samples<extra></extra>",
    }], {
      height: Math.min(620, 120 + 24 * Math.max(classes, 5)), dragmode: narrow() ? false : "zoom",
      xaxis: { title: { text: "client", standoff: 8 }, showgrid: false, zeroline: false },
      yaxis: { title: { text: "class", standoff: 8 }, showgrid: false, zeroline: false, dtick: classes <= 20 ? 1 : undefined },
    });
    const part = found.counts.length < found.of ? ` The first ${found.counts.length} of ${found.of} clients are shown.` : "";
    $("split-note").textContent = `${found.title}.${part}`;
  }

  function settings() {
    const { columns, rows, shared } = group().differences;
    $("differences").replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "setting"),
        ...columns.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows.map(([name, ...values]) => element("tr", {}, element("th", { scope: "row" }, name),
        ...values.map((value) => element("td", {}, value === "" ? "–" : value))))));
    $("shared").replaceChildren(...Object.entries(shared).flatMap(([name, value]) =>
      [element("dt", { class: "mono" }, name), element("dd", { class: "mono" }, value === "" ? "–" : value)]));
  }

  function origin() {
    $("folders").replaceChildren(...data.folders.map((folder) => {
      const { command, ...rest } = folder.provenance;
      const lines = [["results", folder.path], ...Object.entries(rest)];
      const again = folder.searched ? `defedavg tune ${folder.path}/config.toml` : `defedavg run ${folder.path}/config.toml --set name=again`;
      return element("div", {}, element("h3", {}, folder.name),
        folder.finished ? null : element("p", { class: "warn" }, "This study is not finished: it is still running, or it was stopped."),
        ...folder.notes.map((note) => element("p", { class: "warn" }, note)),
        command ? element("p", {}, "Made by") : null, command ? element("pre", {}, command) : null,
        element("p", {}, "To make it again from the complete settings that were kept"), element("pre", {}, again),
        element("dl", {}, ...lines.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
        element("details", {}, element("summary", {}, "The complete configuration"), element("pre", {}, folder.config)),
        folder.plans.length ? element("details", {}, element("summary", {}, `SHA-256 of ${many(folder.plans.length, "plan")}`),
          element("pre", {}, folder.plans.map((p) => `${p.plan}  ${p.label} seed ${p.seed}`).join("\n"))) : null);
    }));
    $("foot").textContent = `Made ${data.made.replace("T", " ").replace("+00:00", "")} UTC by defedavg ${data.version}. The page holds all of its data and asks for nothing.`;
  }

  function charts() {
    curves();
    staleness();
    participation();
  }

  /* The first screen is drawn at once; what lies below follows in steps, so that the page answers from the start. */
  let turn = 0;
  function below() {
    const mine = ++turn;
    const steps = [staleness, participation, ganttChart, split, settings, origin,
      () => { document.documentElement.dataset.ready = "yes"; }];
    const soon = (step) => requestAnimationFrame(() => setTimeout(step, 0));  // what was drawn is shown first
    const next = () => {
      if (mine !== turn || !steps.length) return;
      steps.shift()();
      soon(next);
    };
    soon(next);
  }

  function all() {
    delete document.documentElement.dataset.ready;
    $("search-row").hidden = group().series.length <= 12;
    times();
    chips();
    axes();
    curves();
    chartChoices();
    below();
  }

  $("title").textContent = data.title;
  $("groups").hidden = data.groups.length < 2;
  Charts.radios($("group-switch"), "group", data.groups.map((g, i) => [String(i), g.title]), "0", (value) => {
    state.group = Number(value);
    state.chart = null;
    $("search").value = "";
    all();
  });
  $("search").addEventListener("input", times);
  $("log").addEventListener("change", () => { state.log = $("log").checked; curves(); });
  $("spread").addEventListener("change", curves);
  $("gantt-choice").addEventListener("change", (event) => { state.chart = Number(event.target.value); ganttChart(); });
  $("zoom").addEventListener("click", (event) => { if (event.target.dataset.zoom) zoom(event.target.dataset.zoom); });
  Charts.themeButton($("theme"), all);
  let width = innerWidth < 700;
  addEventListener("resize", () => { if (innerWidth < 700 !== width) { width = innerWidth < 700; all(); } });
  all();
})();
