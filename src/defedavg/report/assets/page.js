/* The report. All of it is drawn from one block of data in the page; untrusted text is inserted as text, never as HTML. */
"use strict";
(() => {
  const { css, colour, narrow, escaped, element, swatch, draw, withOpacity, digits, goal, capital, counted } = Charts;
  const data = JSON.parse(document.getElementById("payload").textContent);
  const $ = (id) => document.getElementById(id);
  const state = { group: 0, axis: "seconds", log: false, activity: null };
  const group = () => data.groups[state.group];
  const shown = () => group().series.filter((s) => s.shown);
  const byRank = (a, b) => a.rank - b.rank;

  // Results.

  const COLUMNS = [
    ["accuracy_text", "best accuracy", (v) => v, "the highest of each seed: mean ± sample standard deviation over seeds"],
    ["final_perplexity", "final perplexity", (v) => (v === null ? "–" : digits(v, 4)), "the exponential of the last loss per token: mean over seeds"],
    ["rounds", "rounds", (v) => digits(v, 4), "merges by the server"],
    ["staleness_mean", "staleness", (v) => digits(v, 3), "mean staleness of merged updates"],
    ["updates_trained", "trained", (v) => (v === null ? "–" : Math.round(v).toLocaleString("en")), "updates that the merges used, with at least one local step"],
    ["wall_seconds", "real time", (v) => (v === null ? "–" : `${digits(v, 3)} s`), "seconds of computation on this computer"],
  ];

  const known = (key) => group().series.some((s) => s[key] !== null);
  const columns = () => COLUMNS.filter(([key]) => key !== "final_perplexity" || known(key)); // texts alone have one

  const resultText = (s) => (group().target ? s.time_text : s.accuracy_text);

  function resultRow(s, longest) {
    const { target, winner, series } = group();
    const value = target ? s.seconds_to_target : s.best_accuracy;
    const best = s === series[winner];
    // A setting that reached the target in fewer seeds ranks lower, even if it was faster in these.
    const fastest = target && series.every((other) => other.seconds_to_target === null || other.seconds_to_target >= value);
    const box = element("input", { type: "checkbox", checked: s.shown, "aria-label": `show ${s.name} in the charts` });
    box.addEventListener("change", () => toggle(s, box.checked));
    const bar = element("span", { class: value === null ? "bar-fill not-reached" : "bar-fill" });
    bar.style.width = `calc(var(--bar-width) * ${value === null ? 1 : Math.max(0.008, value / longest)})`;
    const badge = (text) => element("span", { class: "badge" }, text);
    const name = element("span", { class: "name-cell" }, box, swatch(s.look), element("span", { title: s.name }, s.name),
      best ? badge(fastest ? "★ fastest" : "★ best") : null, s.chosen ? badge("← chosen") : null);
    return element("tr", best ? { class: "best" } : {}, element("th", { scope: "row" }, name),
      element("td", { class: "bar-cell" }, element("span", { class: "bar-row" }, bar, element("span", {}, resultText(s)))),
      ...columns().map(([key, , format]) => element("td", { class: "number" }, format(s[key]))));
  }

  function results() {
    const { clock, conclusion, task, target, metric, series } = group();
    $("conclusion").textContent = conclusion;
    $("task").textContent = task;
    const longest = Math.max(...series.map((s) => (target ? s.seconds_to_target : s.best_accuracy) || 0), 1e-12);
    const head = element("tr", {}, element("th", { scope: "col" }, "setting"),
      element("th", { scope: "col" }, target ? `${clock} to ${goal(target, metric)}` : `best ${metric}`),
      ...columns().map(([, name, , help]) => element("th", { scope: "col", class: "number", title: help }, name.replace("accuracy", metric))));
    const search = $("search").value.toLowerCase();
    const rows = series.filter((s) => s.name.toLowerCase().includes(search)).sort(byRank);
    $("results-table").replaceChildren(
      element("thead", {}, head), element("tbody", {}, ...rows.map((s) => resultRow(s, longest))));
    $("count").textContent = `${counted(rows.length, "setting")}, ${shown().length} shown in the charts`;
    const bars = target
      ? `A bar is the time until the ${metric} first reached the target: mean ± sample standard deviation over the seeds that reached it. Shorter is better, but settings that reached it in more seeds rank first. A hatched bar did not reach the target.`
      : `No target ${metric} was set, so settings are ranked by their best ${metric}: the highest of each seed, mean ± sample standard deviation over seeds. Longer is better.`;
    const more = series.length > shown().length ? " Tick a setting to show it in the charts below." : "";
    $("results-how").replaceChildren(element("b", {}, "How to read it. "), bars + more);
  }

  function toggle(s, on) {
    s.shown = on;
    chips();
    charts();
    document.querySelectorAll("#results-table input").forEach((box) => {
      if (box.getAttribute("aria-label") === `show ${s.name} in the charts`) box.checked = on;
    });
    $("count").textContent = `${shown().length} shown in the charts`;
  }

  function chips() {
    const all = group().series;
    const listed = all.filter((s) => all.length <= 24 || s.shown).sort(byRank);
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.series : null;
    const labels = listed.map((s) => {
      const box = element("input", { type: "checkbox", checked: s.shown, "data-series": String(all.indexOf(s)) });
      box.addEventListener("change", () => toggle(s, box.checked));
      return element("label", { class: "chip", title: s.name }, box, swatch(s.look), element("span", {}, s.name));
    });
    $("chips").replaceChildren(element("legend", {}, "Shown"), ...labels);
    if (focused !== null) {
      const again = $("chips").querySelector(`input[data-series="${CSS.escape(focused)}"]`);
      if (again) again.focus();
    }
  }

  // Curves.

  function curves() {
    const evaluated = group().series.some((s) => s.runs.some((run) => run.x.seconds.length));
    $("curves").hidden = $("chips").hidden = !evaluated;
    if (!evaluated) return;
    const series = shown();
    const options = { axis: state.axis, log: state.log, spread: $("spread").checked, targetAccuracy: group().target, metric: group().metric };
    $("curves-head").textContent = `${capital(group().metric)} and loss`;
    $("metric").textContent = capital(group().metric);
    Charts.curves($("accuracy"), series, "accuracy", options);
    Charts.curves($("loss"), series, "loss", options);
    $("log").checked = state.log;
    const without = series.filter((s) => !s.runs.some((run) => run.x[state.axis])).length;
    const notes = [];
    if (without) notes.push(`${counted(without, "setting")} without a complete plan cannot be shown on this axis.`);
    if (series.some((s) => s.lean_plans)) notes.push("Plans of very many clients leave out jobs that no merge uses, " +
      'so megabytes and client activity are unknown; clients.plan_detail = "all" records everything.');
    if (data.thinning > 1) notes.push(`One evaluation in ${data.thinning} is drawn.`);
    $("axis-note").textContent = notes.join(" ");
  }

  function axes() {
    const has = (axis) => group().series.some((s) => s.runs.some((run) => run.x[axis]));
    const labels = { seconds: capital(Charts.AXES.seconds), rounds: "Rounds", updates: "Updates", megabytes: "Megabytes" };
    const choose = (axis) => {
      state.axis = axis;
      state.log = Charts.wantsLog(shown(), axis);
      curves();
    };
    if (!has(state.axis)) state.axis = "seconds";
    Charts.radios($("axis"), "axis", Object.entries(labels).map(([a, text]) => [a, text, !has(a)]), state.axis, choose);
    state.log = Charts.wantsLog(shown(), state.axis);
    $("spread-row").hidden = !group().series.some((s) => s.runs.length > 1);
  }

  // Staleness and participation.

  /* Bins of staleness that hold 99.5 % of every series; the last bin holds the tail. */
  function stalenessBins(series, totals) {
    const reach = series.map((s, i) => {
      let [seen, last] = [0, 0];
      s.staleness.forEach((count, staleness) => {
        seen += count;
        if (seen <= 0.995 * totals[i] || staleness === 0) last = staleness;
      });
      return Math.min(last + 1, s.staleness.length - 1);
    });
    const highest = Math.max(...reach);
    const width = Math.max(1, Math.ceil((highest + 1) / (narrow() ? 12 : 24)));
    const count = Math.ceil((highest + 1) / width);
    const labels = Array.from({ length: count }, (_, k) => {
      const [from, to] = [k * width, Math.min((k + 1) * width - 1, highest)];
      return from === to ? `${from}` : `${from}–${to}`;
    });
    if (series.some((s) => s.staleness.length - 1 > highest)) labels[count - 1] = `≥ ${(count - 1) * width}`;
    return { labels, count, width };
  }

  function staleness() {
    const series = shown().filter((s) => s.staleness);
    $("staleness-box").hidden = !series.length;
    if (!series.length) return;
    const totals = series.map((s) => s.staleness.reduce((a, b) => a + b, 0) || 1);
    const bins = stalenessBins(series, totals);
    const traces = series.map((s, i) => {
      const y = new Array(bins.count).fill(0);
      s.staleness.forEach((count, value) => { y[Math.min(bins.count - 1, Math.floor(value / bins.width))] += count / totals[i]; });
      return {
        type: "bar", x: bins.labels, y, name: escaped(s.name), marker: { color: colour(s.look) },
        hovertemplate: "%{fullData.name}<br>staleness %{x}: %{y:.1%}<extra></extra>",
      };
    });
    $("staleness").setAttribute("aria-label", `Staleness of merged updates of ${counted(series.length, "setting")}`);
    draw($("staleness"), traces, {
      barmode: "group", bargap: 0.15, height: narrow() ? 300 : 360,
      xaxis: { title: { text: "staleness (merges missed)", standoff: 8 }, type: "category", tickangle: 0,
        dtick: Math.ceil(bins.count / (narrow() ? 4 : 9)) },
      yaxis: { title: { text: "share of merged updates", standoff: 8 }, tickformat: ".0%" },
    });
    const means = series.filter((s) => s.staleness_mean !== null).sort((a, b) => a.staleness_mean - b.staleness_mean);
    $("staleness-note").textContent = means.length < 2 ? "" :
      `Means range from ${digits(means[0].staleness_mean, 2)} (${means[0].name}) to ${digits(means.at(-1).staleness_mean, 2)} (${means.at(-1).name}).`;
  }

  function participation() {
    const series = shown().filter((s) => s.participation);
    $("participation-box").hidden = !series.length;
    $("no-plans").hidden = Boolean(series.length || shown().some((s) => s.staleness));
    $("no-plans").textContent = shown().length
      ? "These runs have no plans: a run writes its plan when it ends; tuning and the paper's tables do not keep plans."
      : "Tick a setting to see it here.";
    if (!series.length) return;
    const clients = Math.max(...series.map((s) => s.participation.clients_per_point));
    $("participation-point").textContent = clients > 1 ? `the mean of ${clients} clients of similar speed` : "a client";
    const traces = series.map((s) => ({
      type: "scatter", mode: "markers", x: s.participation.step.map((x) => 1000 * x), y: s.participation.share,
      name: escaped(s.name), marker: { color: withOpacity(colour(s.look), 0.8), symbol: s.look.symbol, size: 7 },
      hovertemplate: "%{fullData.name}<br>%{x:.3g} ms per step: %{y:.2f} of an equal share<extra></extra>",
    }));
    $("participation").setAttribute("aria-label", `Participation by client speed of ${counted(series.length, "setting")}`);
    draw($("participation"), traces, {
      height: narrow() ? 300 : 360,
      xaxis: { title: { text: "milliseconds per local step (slower →)", standoff: 8 } },
      yaxis: { title: { text: "participation (1 = equal)", standoff: 8 }, rangemode: "tozero" },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: css("--muted"), width: 1.5, dash: "dash" } }],
    });
  }

  const clients = () => Clients.show(group(), shown());

  // Client activity.

  function activityChoices() {
    const all = group().series.map((s, i) => [s, i]).filter(([s]) => s.activity).sort(([a], [b]) => byRank(a, b));
    $("activity-section").hidden = !all.length;
    if (!all.length) return;
    if (!all.some(([, i]) => i === state.activity)) state.activity = all[0][1];
    $("activity-choice").replaceChildren(...all.map(([s, i]) =>
      element("option", { value: String(i), selected: i === state.activity }, `${s.name.slice(0, 80)}, seed ${s.activity_seed}`)));
  }

  function activity() {
    const series = group().series[state.activity];
    if (series && series.activity) Activity.show(series.activity, series.name);
  }

  // Data split, settings, provenance.

  function split() {
    const { split: table } = group();
    $("data").hidden = !table;
    if (!table) return;
    const classes = table.counts[0].length;
    const clients = table.counts.map((_, i) => i);
    const z = Array.from({ length: classes }, (_, label) => table.counts.map((row) => row[label]));
    $("split").setAttribute("aria-label", `Samples of ${classes} classes on ${table.counts.length} clients`);
    draw($("split"), [{
      type: "heatmap", z, x: clients, y: z.map((_, label) => label), zmin: 0, xgap: clients.length <= 120 ? 1 : 0, ygap: 1,
      colorscale: Charts.dark() ? [[0, "#1c2026"], [0.5, "#2f77b0"], [1, "#bfe3ff"]] : [[0, "#f3f5f8"], [0.5, "#6fa8d6"], [1, "#08457e"]],
      colorbar: { thickness: 10, outlinewidth: 0, title: { text: "samples", side: "right", font: { size: 12 } } },
      hovertemplate: "client %{x}, class %{y}: %{z} samples<extra></extra>",
    }], {
      height: Math.min(640, 140 + 24 * Math.max(classes, 5)), dragmode: narrow() ? false : "zoom",
      xaxis: { title: { text: "client", standoff: 8 }, showgrid: false, zeroline: false, dtick: clients.length <= 10 ? 1 : undefined },
      yaxis: { title: { text: "class", standoff: 8 }, showgrid: false, zeroline: false, dtick: classes <= 20 ? 1 : undefined },
    });
    const part = table.counts.length < table.of ? ` The chart shows the first ${table.counts.length} of ${table.of} clients.` : "";
    $("split-note").textContent = `Split of ${table.title}.${part}`;
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

  function deployments() {
    const found = data.folders.filter((folder) => folder.deployment);
    $("deployments").hidden = !found.length;
    $("deployed").replaceChildren(...found.flatMap((folder) => [element("h3", {}, folder.name), Charts.deployment(folder.deployment)]));
  }

  function provenance() {
    $("folders").replaceChildren(...data.folders.map((folder) => {
      const { command, ...versions } = folder.provenance;
      const lines = [["results", folder.path], ...Object.entries(versions)];
      const again = folder.searched ? `defedavg tune ${folder.path}/config.toml` : `defedavg run ${folder.path}/config.toml --set name=again`;
      return element("div", {}, element("h3", {}, folder.name),
        folder.finished ? null : element("p", { class: "warn" }, "This study is not finished: it is still running or was stopped."),
        ...folder.notes.map((note) => element("p", { class: "warn" }, note)),
        command ? element("p", {}, "Command") : null, command ? element("pre", {}, command) : null,
        element("p", {}, "To repeat it with the saved configuration"), element("pre", {}, again),
        element("dl", {}, ...lines.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
        element("details", {}, element("summary", {}, "Complete configuration"), element("pre", {}, folder.config)),
        folder.plans.length ? element("details", {}, element("summary", {}, `SHA-256 of ${counted(folder.plans.length, "plan")}`),
          element("pre", {}, folder.plans.map((p) => `${p.plan}  ${p.label} seed ${p.seed}`).join("\n"))) : null);
    }));
    $("foot").textContent = `Made ${data.made.replace("T", " ").replace("+00:00", "")} UTC by defedavg ${data.version}. The page contains all of its data and loads nothing from a network.`;
  }

  function charts() {
    curves();
    staleness();
    participation();
    clients();
  }

  /* The first screen is drawn at once. The sections below follow in steps, so that the page responds from the start. */
  let latest = 0;
  function drawBelow() {
    const current = ++latest;
    const steps = [staleness, participation, clients, activity, deployments, split, settings, provenance,
      () => { document.documentElement.dataset.ready = "yes"; }];
    // A hidden tab, and a browser that only prints or makes a screenshot, paints no frame: a timer continues there.
    const afterPaint = (step) => {
      let due = true;
      const once = () => { if (due) setTimeout(step, 0); due = false; };
      requestAnimationFrame(once);
      setTimeout(once, 250);
    };
    const next = () => {
      if (current !== latest || !steps.length) return;
      steps.shift()();
      afterPaint(next);
    };
    afterPaint(next);
  }

  function drawAll() {
    delete document.documentElement.dataset.ready;
    Charts.setClock(group().clock);
    $("search-row").hidden = group().series.length <= 12;
    results();
    chips();
    axes();
    curves();
    activityChoices();
    drawBelow();
  }

  $("title").textContent = data.title;
  $("groups").hidden = data.groups.length < 2;
  Charts.radios($("group-switch"), "group", data.groups.map((g, i) => [String(i), g.title]), "0", (value) => {
    state.group = Number(value);
    state.activity = null;
    $("search").value = "";
    drawAll();
  });
  $("search").addEventListener("input", results);
  $("log").addEventListener("change", () => { state.log = $("log").checked; curves(); });
  $("spread").addEventListener("change", curves);
  $("activity-choice").addEventListener("change", (event) => { state.activity = Number(event.target.value); activity(); });
  $("zoom").addEventListener("click", (event) => {
    const { zoom } = event.target.dataset;
    if (zoom) Activity.zoom(group().series[state.activity].activity, zoom);
  });
  Charts.themeButton($("theme"), drawAll);
  let wasNarrow = narrow();
  addEventListener("resize", () => { if (narrow() !== wasNarrow) { wasNarrow = narrow(); drawAll(); } });
  drawAll();
})();
