/* The live view: asks once a second which runs there are, and for the curves of those that are ticked and changed. */
"use strict";
(() => {
  const { element, swatch } = Charts;
  const $ = (id) => document.getElementById(id);
  const SECOND = 1000;
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#8C6D31"];
  const BRIGHT = ["#5aaee0", "#f0813f", "#3fc49d", "#e0a3c4", "#f2c35c", "#8fd0f5", "#c96a95", "#c0a05e"];
  const DASHES = ["solid", "8px,4px", "3px,3px", "10px,3px,3px,3px"];
  const SYMBOLS = ["circle", "x", "triangle-up", "triangle-down", "diamond", "square", "cross", "star"];
  const MOST = 24;  // curves at once

  let runs = [];
  let axis = "seconds";
  let chosenLog = null;  // until somebody chooses, the data do
  let listed = "";
  const ticked = new Map();  // id -> { sign, series }, or null before they came
  const seen = new Set();
  const hidden = new Set();  // curves that are switched off

  const words = (run) => `${run.id} ${run.name} ${run.status} ${run.algorithms.join(" ")} ${run.words}`
    .toLowerCase().replace(/\s*=\s*/g, "=").replace(/["']/g, "");
  const ago = (moment) => {
    const gone = Math.max(0, Date.now() / 1000 - moment);
    if (gone < 10) return "now";
    if (gone < 90) return `${10 * Math.round(gone / 10)} s ago`;  // a table that changes every second cannot be read
    const [size, unit] = gone < 5400 ? [60, "min"] : gone < 129600 ? [3600, "h"] : [86400, "days"];
    return `${Math.round(gone / size)} ${unit} ago`;
  };

  async function get(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (answer.status === 404) return null;
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  async function look() {
    let changed = false;
    try {
      const found = await get("/api/runs");
      runs = found.runs;
      $("root").textContent = found.root;
      $("trouble").hidden = true;
      const here = new Map(runs.map((run) => [run.id, run]));
      for (const id of [...ticked.keys()]) {
        if (!here.has(id)) {
          ticked.delete(id);
          changed = true;
        }
      }
      runs.forEach((run, place) => {  // what runs is shown by itself, and at first the newest
        if (!seen.has(run.id) && (run.status === "running" || (!seen.size && place === 0))) ticked.set(run.id, null);
      });
      runs.forEach((run) => seen.add(run.id));
      for (const [id, known] of [...ticked]) {
        if (known && known.sign === here.get(id).sign) continue;
        const curves = await get(`/api/run?id=${encodeURIComponent(id)}`);
        if (curves === null) ticked.delete(id);
        else ticked.set(id, curves);
        changed = true;
      }
    } catch (error) {
      $("trouble").textContent = `The server does not answer (is \`defedavg view\` still running?): ${error.message}`;
      $("trouble").hidden = false;
    }
    table();
    if (changed || !document.documentElement.dataset.ready) curves();
    document.documentElement.dataset.ready = "yes";
    setTimeout(look, SECOND);
  }

  function table() {
    const wanted = $("search").value.toLowerCase().replace(/\s*=\s*/g, "=").split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => wanted.every((word) => words(run).includes(word)));
    $("counted").textContent = `${shown.length} of ${runs.length} runs`;
    const print = JSON.stringify([shown.map((run) => [run.sign, run.id, run.status, ago(run.changed)]), [...ticked.keys()]]);
    if (print === listed) return;  // a table that is not made again keeps the focus and the selection
    listed = print;
    const active = document.activeElement;
    const focused = active && $("list").contains(active) ? active.dataset.key : null;
    const head = ["run", "status", "done", "algorithms", "best", "changed", "report"];
    const body = shown.map((run) => {
      const box = element("input", { type: "checkbox", checked: ticked.has(run.id), "aria-label": `show ${run.id}`, "data-key": `box ${run.id}` });
      box.addEventListener("change", () => {
        if (box.checked) ticked.set(run.id, null);
        else ticked.delete(run.id);
        fetchNow();
      });
      const link = element("a", { href: `/report?id=${encodeURIComponent(run.id)}`, target: "_blank", rel: "noopener", "data-key": `link ${run.id}` }, "open");
      const said = run.status === "running" ? "▶ running" : run.status;
      return element("tr", { "data-run": run.id }, element("th", { scope: "row", title: run.command },
        element("span", { class: "named" }, box, element("span", {}, run.id === "." ? run.name : run.id))),
        element("td", { class: `word ${run.status === "running" ? "medal" : run.status === "finished" ? "" : "warn"}` }, said),
        element("td", { class: "number" }, `${run.done}/${run.expected}`),
        element("td", { class: "wide" }, run.algorithms.join(", ")),
        element("td", { class: "number" }, run.best === null ? "–" : `${(100 * run.best).toFixed(1)} %`),
        element("td", { class: "number" }, ago(run.changed)), element("td", {}, link));
    });
    if (!runs.length) body.push(element("tr", {}, element("td", { colspan: "7" }, "There are no runs yet. Start one: defedavg run my.toml")));
    $("list").replaceChildren(
      element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...body));
    if (focused !== null) {
      const again = [...$("list").querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused);
      if (again) again.focus({ preventScroll: true });
    }
  }

  async function fetchNow() {
    for (const [id, known] of [...ticked]) {
      if (known) continue;
      try {
        const found = await get(`/api/run?id=${encodeURIComponent(id)}`);
        if (found === null) ticked.delete(id);
        else ticked.set(id, found);
      } catch { /* the next look says what is wrong */ }
    }
    listed = "";
    table();
    curves();
  }

  function series() {
    const several = ticked.size > 1;
    const all = [...ticked].flatMap(([id, known]) => (known ? known.series.map((s) => ({
      ...s, key: `${id} ${s.name}`, name: several ? `${id}: ${s.name}` : s.name,
    })) : []));
    return all.slice(0, MOST).map((s, i) => ({
      ...s, look: {
        light: COLOURS[i % COLOURS.length], dark: BRIGHT[i % BRIGHT.length], symbol: SYMBOLS[i % SYMBOLS.length],
        dash: DASHES[Math.floor(i / COLOURS.length) % DASHES.length],
      },
    }));
  }

  function curves() {
    const all = series();
    const shown = all.filter((s) => !hidden.has(s.key));
    $("empty").hidden = Boolean(all.length);
    $("empty").textContent = ticked.size ? "Nothing was measured yet." : "Tick a run to see its curves.";
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
    const options = { axis, log, spread: $("spread").checked, target: targets.size === 1 ? [...targets][0] : null };
    Charts.curves($("accuracy"), shown, "accuracy", options);
    Charts.curves($("loss"), shown, "loss", options);
  }

  const choices = [["seconds", "Simulated seconds"], ["rounds", "Rounds"], ["updates", "Updates"]];
  Charts.radios($("axis"), "axis", choices, axis, (value) => { axis = value; chosenLog = null; curves(); });
  $("log").addEventListener("change", () => { chosenLog = $("log").checked; curves(); });
  $("spread").addEventListener("change", curves);
  $("search").addEventListener("input", () => { listed = ""; table(); });
  Charts.themeButton($("theme"), curves);
  look();
})();
