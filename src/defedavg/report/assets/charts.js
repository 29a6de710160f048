/* Charts shared by the report and the live view. Untrusted text reaches Plotly only through escaped(). */
"use strict";
const Charts = (() => {
  const AXES = {
    seconds: "simulated seconds",
    rounds: "rounds (merges by the server)",
    updates: "updates trained",
    megabytes: "megabytes sent, up and down",
  };
  /* What the seconds of the shown runs are: simulated, or those of a deployment. */
  const setClock = (name) => { AXES.seconds = name; };
  const MAX_POINTS = 1000;  // of a line over several seeds

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const colour = (look) => (dark() ? look.dark : look.light);
  const narrow = () => innerWidth < 700;

  /* Plotly interprets tags and entities in its texts, so untrusted text is escaped, and shortened. */
  function escaped(text, limit = 48) {
    const letters = Array.from(String(text));
    const cut = letters.length > limit ? letters.slice(0, limit - 1).join("") + "…" : letters.join("");
    return cut.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function element(tag, attributes = {}, ...children) {
    const created = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in created && typeof value !== "string") created[name] = value;
      else created.setAttribute(name, value);
    }
    created.append(...children.filter((child) => child !== null && child !== undefined));
    return created;
  }

  /* A short line in the style of a series. */
  function swatch(look) {
    const namespace = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(namespace, "svg");
    for (const [name, value] of [["width", 26], ["height", 12], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
    const line = document.createElementNS(namespace, "line");
    const stroke = { x1: 1, x2: 25, y1: 6, y2: 6, stroke: colour(look), "stroke-width": 3 };
    if (look.dash !== "solid") stroke["stroke-dasharray"] = look.dash.replaceAll("px", "");
    for (const [name, value] of Object.entries(stroke)) line.setAttribute(name, value);
    svg.append(line);
    return svg;
  }

  function layout(more = {}) {
    const axis = () => ({
      gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true,
      title: { standoff: 8 }, tickcolor: css("--line"), ticks: "outside", ticklen: 4,
    });
    const made = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
      margin: { l: 54, r: narrow() ? 12 : 20, t: 34, b: 48 }, height: narrow() ? 320 : 400,  // the buttons are above the axes
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
      hovermode: "closest", dragmode: narrow() ? false : "zoom", xaxis: axis(), yaxis: axis(),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") },
    };
    for (const [name, value] of Object.entries(more)) {
      made[name] = value && typeof value === "object" && !Array.isArray(value) ? { ...made[name], ...value } : value;
    }
    return made;
  }

  const CONFIG = {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    toImageButtonOptions: { format: "png", scale: 2 },
  };

  const draw = (target, traces, more) => Plotly.react(target, traces, layout(more), CONFIG);

  /* Mean, minimum and maximum of the seeds on the union of their x; each holds its last value from its first x to its last. */
  function band(runs, axis, measure) {
    const seeds = runs
      .map((run) => ({ x: run.x[axis], y: run[measure] }))
      .filter((seed) => seed.x && seed.x.length);
    if (seeds.length === 1) {
      const { x, y } = seeds[0];
      return { x, mean: y, low: y, high: y };
    }
    const whole = Array.from(new Set(seeds.flatMap((seed) => seed.x))).sort((a, b) => a - b);
    const step = Math.ceil(whole.length / MAX_POINTS);  // more points than pixels only cost time
    const grid = whole.filter((_, k) => k % step === 0 || k === whole.length - 1);
    const latest = seeds.map(() => -1);  // index of the last evaluation so far
    const result = { x: grid, mean: [], low: [], high: [] };
    for (const position of grid) {
      let [sum, count, low, high] = [0, 0, Infinity, -Infinity];
      seeds.forEach((seed, i) => {
        while (latest[i] + 1 < seed.x.length && seed.x[latest[i] + 1] <= position) latest[i] += 1;
        if (latest[i] < 0 || position > seed.x[seed.x.length - 1]) return;
        const value = seed.y[latest[i]];
        count += 1;
        sum += value === null ? NaN : value;
        low = Math.min(low, value === null ? NaN : value);
        high = Math.max(high, value === null ? NaN : value);
      });
      result.mean.push(Number.isFinite(sum) ? sum / count : null);
      result.low.push(Number.isFinite(low) ? low : null);
      result.high.push(Number.isFinite(high) ? high : null);
    }
    return result;
  }

  /* The outline of a band, as a staircase: values hold until the next x. */
  function outline(seeds, positive) {
    const kept = seeds.x.map((x, i) => i).filter((i) => seeds.low[i] !== null && (!positive || seeds.x[i] > 0));
    const [x, upper, lower] = [[], [], []];
    kept.forEach((i, k) => {
      if (k) {
        x.push(seeds.x[i]);
        upper.push(seeds.high[kept[k - 1]]);
        lower.push(seeds.low[kept[k - 1]]);
      }
      x.push(seeds.x[i]);
      upper.push(seeds.high[i]);
      lower.push(seeds.low[i]);
    });
    return { x: x.concat(x.slice().reverse()), y: upper.concat(lower.reverse()) };
  }

  const withOpacity = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

  /* Runs of very different lengths are compared on a logarithmic axis. */
  function wantsLog(series, axis) {
    const ends = series.flatMap((s) => s.runs).map((run) => (run.x[axis] || []).at(-1)).filter((end) => end > 0);
    return ends.length > 1 && Math.max(...ends) > 8 * Math.min(...ends);
  }

  /* Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10, or 1, 10, 100 over a wide range. */
  function ticks(values) {
    const [low, high] = values.reduce(([a, b], v) => (v > 0 ? [Math.min(a, v), Math.max(b, v)] : [a, b]), [Infinity, 0]);
    if (!(high > 0)) return {};
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const steps = Math.log10(high / low) > (narrow() ? 1.2 : 2.2) ? [1] : [1, 2, 5];
    const tickvals = [];
    for (let k = first; k <= last; k += 1) tickvals.push(...steps.map((step) => step * 10 ** k));
    return { tickvals, ticktext: tickvals.map((value) => String(+value.toPrecision(3))) };
  }

  function curves(target, series, measure, options) {
    const { axis, log, spread, targetAccuracy, metric } = options;
    const percentages = measure === "accuracy" && metric === "accuracy";
    const title = measure === "accuracy" ? `test ${metric}` : "test loss";
    const traces = [];
    const drawn = series.filter((s) => s.runs.some((run) => run.x[axis] && run.x[axis].length));
    const bands = drawn.map((s) => band(s.runs, axis, measure));
    const values = bands.flatMap((b) => b.mean).filter((v) => v !== null);
    const [lowest, highest] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    drawn.forEach((s, i) => {
      if (!spread || s.runs.filter((run) => run.x[axis] && run.x[axis].length).length < 2) return;
      const line = { color: colour(s.look), width: 0 };
      traces.push({
        ...outline(bands[i], log), type: "scatter", mode: "lines", fill: "toself", line, hoverinfo: "skip",
        fillcolor: withOpacity(colour(s.look), 0.18), name: escaped(s.name), meta: "band",
      });
    });
    drawn.forEach((s, i) => {
      const { x, mean } = bands[i];
      const kept = x.map((_, k) => k).filter((k) => !log || x[k] > 0);
      traces.push({
        x: kept.map((k) => x[k]), y: kept.map((k) => mean[k]), type: "scatter", mode: "lines+markers",
        line: { color: colour(s.look), width: 2.2, shape: "hv", dash: s.look.dash }, name: escaped(s.name),
        marker: { symbol: s.look.symbol, size: 8, color: colour(s.look), maxdisplayed: 9 }, meta: "mean",
        hovertemplate: `%{fullData.name}<br>%{x:.4g} ${AXES[axis].split(" (")[0]}<br>` +
          (percentages ? "%{y:.2%}" : `${escaped(title.slice(5))} %{y:.4g}`) + "<extra></extra>",
      });
    });
    const more = {
      xaxis: { title: { text: AXES[axis], standoff: 8 }, type: log ? "log" : "linear", rangemode: "tozero" },
      yaxis: { title: { text: escaped(title), standoff: 8 } },
    };
    if (log) Object.assign(more.xaxis, ticks(bands.flatMap((b) => b.x)));
    if (measure === "accuracy") {
      if (percentages) Object.assign(more.yaxis, { tickformat: ".0%", rangemode: "tozero" });
      if (targetAccuracy) {
        more.shapes = [{
          type: "line", xref: "paper", x0: 0, x1: 1, y0: targetAccuracy, y1: targetAccuracy,
          line: { color: css("--muted"), width: 1.5, dash: "dash" },
        }];
        more.annotations = [{
          xref: "paper", x: 1, y: targetAccuracy, xanchor: "left", yanchor: "middle", showarrow: false, align: "left",
          text: `target<br>${goal(targetAccuracy, metric)}`, font: { color: css("--muted"), size: 12 },
        }];
        more.margin = { r: 58 };  // beside the axes, where no curve crosses it
      }
    } else if (lowest > 0 && highest > 20 * lowest) {
      Object.assign(more.yaxis, { type: "log" }, ticks(values));
    }
    target.setAttribute("aria-label", `${title} over ${AXES[axis]} of ${drawn.length} settings`);
    return draw(target, traces, more);
  }

  function themeButton(button, changed) {
    const order = ["", "light", "dark"];
    const labels = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
    let current = 0;
    button.textContent = labels[""];
    button.addEventListener("click", () => {
      current = (current + 1) % order.length;
      if (order[current]) document.documentElement.dataset.theme = order[current];
      else delete document.documentElement.dataset.theme;
      button.textContent = labels[order[current]];
      changed();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  }

  /* Radio buttons in the style of a switch. */
  function radios(parent, name, choices, chosen, changed) {
    parent.replaceChildren(...choices.map(([value, text, disabled]) => {
      const input = element("input", { type: "radio", name, value, checked: value === chosen, disabled: Boolean(disabled) });
      input.addEventListener("change", () => changed(value));
      return element("label", {}, input, element("span", {}, text));
    }));
  }

  /* Numbers as text. */
  const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
  const digits = (value, count = 4) => (value === null ? "–" : String(+value.toPrecision(count)));
  /* The accuracy is a percentage; other metrics are shown as they are. */
  const score = (value, metric) => (metric === "accuracy" ? percent(value) : digits(value, 4));
  const goal = (value, metric) => (metric === "accuracy" ? `${+(100 * value).toPrecision(4)} %` : digits(value, 4));
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  const counted = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

  const SHOWN_CLIENTS = 200;
  const timeLeft = (seconds) => (seconds < 120 ? `${digits(seconds, 2)} s` : seconds < 7200 ? `${digits(seconds / 60, 2)} min` : `${digits(seconds / 3600, 2)} h`);

  /* A deployment: what its clients do, the rate of updates, staleness, and what was refused. */
  function deployment(found) {
    const facts = [
      ["clients connected", `${found.connected} of ${found.clients.length}`],
      ["run", `${found.ended || "in progress"}, round ${found.round}${found.goals.max_rounds === null ? "" : ` of at most ${found.goals.max_rounds}`}, ${digits(found.seconds, 3)} s`],
      ["updates", `${found.updates.toLocaleString("en")}${found.updates_per_second === null ? "" : `, ${digits(found.updates_per_second, 3)} a second`}`],
      ["staleness, mean", digits(found.staleness_mean, 3)],
      ["refused", counted(found.refused, "update")],
      ["failed", counted(found.failed, "job")],
      ["forecast", found.seconds_left === null ? "–" : `about ${timeLeft(found.seconds_left)} left, until ${found.left_until}`],
    ];
    const shown = found.clients.slice(0, SHOWN_CLIENTS);
    const head = ["client", "state", "since (s)", "from version", "updates", "refused"];
    const rows = shown.map((c) => element("tr", { "data-client": String(c.client) }, element("th", { scope: "row" }, String(c.client)),
      element("td", { class: c.state === "away" || c.state === "quarantined" ? "warn" : "" }, c.state),
      ...[digits(c.since, 4), c.version === null ? "–" : String(c.version), String(c.updates), String(c.refused)]
        .map((text) => element("td", { class: "number" }, text))));
    const reasons = Object.entries(found.reasons).map(([why, count]) => element("li", {}, `${count} × ${why}`));
    const excluded = Object.entries(found.excluded).map(([who, why]) => element("li", { class: "warn" }, `${who} cannot take part: ${why}`));
    return element("div", { class: "deployment" },
      element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
      excluded.length ? element("ul", {}, ...excluded) : null,
      reasons.length ? element("div", {}, element("h3", {}, "Refused updates"), element("ul", {}, ...reasons)) : null,
      element("div", { class: "frame", tabindex: "0", role: "region", "aria-label": "Clients" }, element("table", {},
        element("thead", {}, element("tr", {}, ...head.map((name, i) => element("th", { scope: "col", class: i < 2 ? "" : "number" }, name)))),
        element("tbody", {}, ...rows))),
      shown.length < found.clients.length ? element("p", { class: "muted" }, `The table shows the first ${shown.length} of ${found.clients.length} clients.`) : null);
  }

  return { AXES, setClock, deployment, percent, digits, score, goal, capital, counted, css, dark, colour, narrow, escaped, element, swatch, draw, band, withOpacity, wantsLog, curves, themeButton, radios };
})();
