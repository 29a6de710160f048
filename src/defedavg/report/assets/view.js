/* The live view: requests the list of runs once a second, and the curves of ticked runs that changed. */
"use strict";
(() => {
  const { element, swatch, capital } = Charts;
  const $ = (id) => document.getElementById(id);
  const INTERVAL = 1000;  // milliseconds
  const MAX_CURVES = 24;

  let runs = [];
  let axis = "seconds";
  let chosenLog = null;  // null: the data decide
  let tableState = "";  // what the table shows
  const ticked = new Map();  // id -> { revision, series }, or null until loaded
  const seen = new Set();
  const hidden = new Set();  // curves that are not drawn

  const searchText = (run) => `${run.id} ${run.name} ${run.status} ${run.algorithms.join(" ")} ${run.config}`
    .toLowerCase().replace(/\s*=\s*/g, "=").replace(/["']/g, "");
  const ago = (time) => {
    const age = Math.max(0, Date.now() / 1000 - time);
    if (age < 10) return "now";
    if (age < 90) return `${10 * Math.round(age / 10)} s ago`;  // a table that changes every second is hard to read
    const [size, unit] = age < 5400 ? [60, "min"] : age < 129600 ? [3600, "h"] : [86400, "days"];
    return `${Math.round(age / size)} ${unit} ago`;
  };

  async function get(path) {
    const response = await fetch(path, { cache: "no-store" });
    if (response.status === 404) return null;
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  }

  async function load(id) {
    const run = await get(`/api/run?id=${encodeURIComponent(id)}`);
    if (run === null) ticked.delete(id);
    else ticked.set(id, run);
  }

  async function refresh() {
    let changed = false;
    try {
      const list = await get("/api/runs");
      runs = list.runs;
      $("root").textContent = list.root;
      $("error").hidden = true;
      const present = new Map(runs.map((run) => [run.id, run]));
      for (const id of [...ticked.keys()]) {
        if (!present.has(id)) {
          ticked.delete(id);
          changed = true;
        }
      }
      runs.forEach((run, i) => {  // running studies, and at first the newest, are ticked automatically
        if (!seen.has(run.id) && (run.status === "running" || (!seen.size && i === 0))) ticked.set(run.id, null);
      });
      runs.forEach((run) => seen.add(run.id));
      for (const [id, loaded] of [...ticked]) {
        if (loaded && loaded.revision === present.get(id).revision) continue;
        await load(id);
        changed = true;
      }
    } catch (error) {
      $("error").textContent = `The server does not answer; check that \`defedavg view\` is running: ${error.message}`;
      $("error").hidden = false;
    }
    table();
    if (changed || !document.documentElement.dataset.ready) curves();
    document.documentElement.dataset.ready = "yes";
    setTimeout(refresh, INTERVAL);
  }

  function table() {
    const search = $("search").value.toLowerCase().replace(/\s*=\s*/g, "=").split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => search.every((word) => searchText(run).includes(word)));
    $("count").textContent = `${shown.length} of ${runs.length} runs`;
    const newState = JSON.stringify([shown.map((run) => [run.revision, run.id, run.status, ago(run.changed)]), [...ticked.keys()]]);
    if (newState === tableState) return;  // an unchanged table keeps the focus and the selection
    tableState = newState;
    const active = document.activeElement;
    const focused = active && $("list").contains(active) ? active.dataset.key : null;
    const metrics = new Set(runs.map((run) => run.metric));
    const best = metrics.size === 1 ? `best ${[...metrics][0]}` : metrics.size ? "best metric" : "best accuracy";
    const head = ["run", "status", "done", "algorithms", best, "changed", "report"];
    const help = { [best]: "of the best setting: the highest of each seed, mean ± sample standard deviation over seeds" };
    const body = shown.map((run) => {
      const box = element("input", { type: "checkbox", checked: ticked.has(run.id), "aria-label": `show ${run.id}`, "data-key": `box ${run.id}` });
      box.addEventListener("change", () => {
        if (box.checked) ticked.set(run.id, null);
        else ticked.delete(run.id);
        loadTicked();
      });
      const link = element("a", { href: `/report?id=${encodeURIComponent(run.id)}`, target: "_blank", rel: "noopener", "data-key": `link ${run.id}` }, "open");
      const status = run.status === "running" ? "▶ running" : run.status;
      return element("tr", { "data-run": run.id }, element("th", { scope: "row", title: run.command },
        element("span", { class: "name-cell" }, box, element("span", {}, run.id === "." ? run.name : run.id))),
        element("td", { class: `status ${run.status === "running" ? "badge" : run.status === "finished" ? "" : "warn"}` }, status),
        element("td", { class: "number" }, `${run.done}/${run.expected}`),
        element("td", { class: "wide" }, run.algorithms.join(", ")),
        element("td", { class: "number" }, run.best_accuracy),
        element("td", { class: "number" }, ago(run.changed)), element("td", {}, link));
    });
    if (!runs.length) body.push(element("tr", {}, element("td", { colspan: "7" }, "There are no runs yet. Start one with: defedavg run my.toml")));
    $("list").replaceChildren(
      element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col", title: help[name] || "" }, name)))),
      element("tbody", {}, ...body));
    if (focused !== null) {
      const again = [...$("list").querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused);
      if (again) again.focus({ preventScroll: true });
    }
  }

  async function loadTicked() {
    for (const [id, loaded] of [...ticked]) {
      if (loaded) continue;
      try {
        await load(id);
      } catch { /* the next refresh shows the error */ }
    }
    tableState = "";
    table();
    curves();
  }

  function series() {
    const several = ticked.size > 1;
    const all = [...ticked].flatMap(([id, loaded]) => (loaded ? loaded.series.map((s) => ({
      ...s, key: `${id} ${s.name}`, name: several ? `${id}: ${s.name}` : s.name,
    })) : []));
    const counts = new Map();  // settings so far that begin with the same look
    return all.slice(0, MAX_CURVES).map((s) => {
      const first = `${s.looks[0].light} ${s.looks[0].symbol}`;
      const count = counts.get(first) || 0;
      counts.set(first, count + 1);
      return { ...s, look: s.looks[count % s.looks.length] };
    });
  }

  function deployments() {
    const found = [...ticked].filter(([, loaded]) => loaded && loaded.deployment);
    $("deployments").hidden = !found.length;
    $("deployed").replaceChildren(...found.flatMap(([id, loaded]) => [element("h3", {}, id), Charts.deployment(loaded.deployment)]));
  }

  function curves() {
    deployments();
    const kinds = new Set([...ticked.values()].filter(Boolean).map((loaded) => Boolean(loaded.deployment)));
    Charts.setClock(kinds.size > 1 ? "seconds" : kinds.has(true) ? "seconds of the deployment" : "simulated seconds");
    const all = series();
    const shown = all.filter((s) => !hidden.has(s.key));
    $("empty").hidden = Boolean(all.length);
    $("empty").textContent = ticked.size ? "No evaluation yet." : "Tick a run to see its curves.";
    $("charts").hidden = !all.length;
    $("chips").replaceChildren(element("legend", {}, "Curves"), ...all.map((s) => {
      const box = element("input", { type: "checkbox", checked: !hidden.has(s.key) });
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(s.key);
        else hidden.add(s.key);
        curves();
        const again = [...$("chips").querySelectorAll("input")][all.indexOf(s)];
        if (again) again.focus();
      });
      return element("label", { class: "chip", title: s.name }, box, swatch(s.look), element("span", {}, s.name));
    }));
    if (!all.length) return;
    const targets = new Set(shown.map((s) => s.target).filter(Boolean));
    const log = chosenLog === null ? Charts.wantsLog(shown, axis) : chosenLog;
    $("log").checked = log;
    const metrics = new Set(shown.map((s) => s.metric));
    const metric = metrics.size === 1 ? [...metrics][0] : metrics.size ? "metric" : "accuracy";
    $("metric").textContent = capital(metric);
    const options = { axis, log, spread: $("spread").checked, metric, targetAccuracy: targets.size === 1 ? [...targets][0] : null };
    Charts.curves($("accuracy"), shown, "accuracy", options);
    Charts.curves($("loss"), shown, "loss", options);
  }

  const choices = [["seconds", "Seconds"], ["rounds", "Rounds"], ["updates", "Updates"]];
  Charts.radios($("axis"), "axis", choices, axis, (value) => { axis = value; chosenLog = null; curves(); });
  $("log").addEventListener("change", () => { chosenLog = $("log").checked; curves(); });
  $("spread").addEventListener("change", curves);
  $("search").addEventListener("input", () => { tableState = ""; table(); });
  Charts.themeButton($("theme"), curves);
  refresh();
})();
