/* Curves of runs, for the report and for the live view. Text from outside reaches Plotly only through plain(). */
"use strict";
const Charts = (() => {
  const AXES = {
    seconds: "simulated seconds",
    rounds: "rounds (merges by the server)",
    updates: "updates trained",
    bytes: "megabytes sent, up and down",
  };
  const MOST = 1000;  // points of a line over several seeds
  const MEASURES = { accuracy: "test accuracy", loss: "test loss" };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const colour = (look) => (dark() ? look.dark : look.light);
  const narrow = () => innerWidth < 700;

  /* Plotly reads tags and entities in its texts: what comes from outside is shown letter by letter, and cut. */
  function plain(text, most = 48) {
    const letters = Array.from(String(text));
    const cut = letters.length > most ? letters.slice(0, most - 1).join("") + "…" : letters.join("");
    return cut.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in made && typeof value !== "string") made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  /* A short stroke in the look of a series. */
  function swatch(look) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    for (const [name, value] of [["width", 26], ["height", 12], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
    const line = document.createElementNS(space, "line");
    const drawn = { x1: 1, x2: 25, y1: 6, y2: 6, stroke: colour(look), "stroke-width": 3 };
    if (look.dash !== "solid") drawn["stroke-dasharray"] = look.dash.replaceAll("px", "");
    for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
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
      margin: { l: 54, r: narrow() ? 12 : 20, t: 14, b: 48 }, height: narrow() ? 300 : 380,
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
      hovermode: "closest", dragmode: narrow() ? false : "zoom", xaxis: axis(), yaxis: axis(),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
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

  const draw = (place, traces, more) => Plotly.react(place, traces, layout(more), CONFIG);

  /* Seeds on the union of their x, each holding its last value from its first x to its last: mean, least, greatest. */
  function band(runs, axis, measure) {
    const seeds = runs
      .map((run) => ({ x: run.x[axis], y: run[measure] }))
      .filter((seed) => seed.x && seed.x.length);
    if (seeds.length === 1) {
      const { x, y } = seeds[0];
      return { x, mean: y, low: y, high: y };
    }
    const whole = Array.from(new Set(seeds.flatMap((seed) => seed.x))).sort((a, b) => a - b);
    const step = Math.ceil(whole.length / MOST);  // a line of more points than the screen has only takes longer
    const grid = whole.filter((_, k) => k % step === 0 || k === whole.length - 1);
    const at = seeds.map(() => -1);
    const found = { x: grid, mean: [], low: [], high: [] };
    for (const moment of grid) {
      let [sum, count, low, high] = [0, 0, Infinity, -Infinity];
      seeds.forEach((seed, i) => {
        while (at[i] + 1 < seed.x.length && seed.x[at[i] + 1] <= moment) at[i] += 1;
        if (at[i] < 0 || moment > seed.x[seed.x.length - 1]) return;
        const value = seed.y[at[i]];
        count += 1;
        sum += value === null ? NaN : value;
        low = Math.min(low, value === null ? NaN : value);
        high = Math.max(high, value === null ? NaN : value);
      });
      found.mean.push(Number.isFinite(sum) ? sum / count : null);
      found.low.push(Number.isFinite(low) ? low : null);
      found.high.push(Number.isFinite(high) ? high : null);
    }
    return found;
  }

  /* The outline of a band whose values hold until the next x. */
  function outline(found, positive) {
    const ok = found.x.map((x, i) => i).filter((i) => found.low[i] !== null && (!positive || found.x[i] > 0));
    const [x, up, down] = [[], [], []];
    ok.forEach((i, place) => {
      if (place) {
        x.push(found.x[i]);
        up.push(found.high[ok[place - 1]]);
        down.push(found.low[ok[place - 1]]);
      }
      x.push(found.x[i]);
      up.push(found.high[i]);
      down.push(found.low[i]);
    });
    return { x: x.concat(x.slice().reverse()), y: up.concat(down.reverse()) };
  }

  const faded = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

  /* Ends that differ much are compared on a logarithmic axis. */
  function wantsLog(series, axis) {
    const ends = series.flatMap((s) => s.runs).map((run) => (run.x[axis] || []).at(-1)).filter((end) => end > 0);
    return ends.length > 1 && Math.max(...ends) > 8 * Math.min(...ends);
  }

  /* Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10, or only 1, 10, 100 where there are many. */
  function ticks(values) {
    const [low, high] = values.reduce(([a, b], v) => (v > 0 ? [Math.min(a, v), Math.max(b, v)] : [a, b]), [Infinity, 0]);
    if (!(high > 0)) return {};
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const steps = Math.log10(high / low) > (narrow() ? 1.2 : 2.2) ? [1] : [1, 2, 5];
    const tickvals = [];
    for (let k = first; k <= last; k += 1) tickvals.push(...steps.map((step) => step * 10 ** k));
    return { tickvals, ticktext: tickvals.map((value) => String(+value.toPrecision(3))) };
  }

  function curves(place, series, measure, options) {
    const { axis, log, spread, target } = options;
    const traces = [];
    const known = series.filter((s) => s.runs.some((run) => run.x[axis] && run.x[axis].length));
    const bands = known.map((s) => band(s.runs, axis, measure));
    const values = bands.flatMap((b) => b.mean).filter((v) => v !== null);
    const [least, most] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    known.forEach((s, i) => {
      if (!spread || s.runs.filter((run) => run.x[axis] && run.x[axis].length).length < 2) return;
      const line = { color: colour(s.look), width: 0 };
      traces.push({
        ...outline(bands[i], log), type: "scatter", mode: "lines", fill: "toself", line, hoverinfo: "skip",
        fillcolor: faded(colour(s.look), 0.18), name: plain(s.name), meta: "band",
      });
    });
    known.forEach((s, i) => {
      const found = bands[i];
      const kept = found.x.map((x, k) => k).filter((k) => !log || found.x[k] > 0);
      traces.push({
        x: kept.map((k) => found.x[k]), y: kept.map((k) => found.mean[k]), type: "scatter", mode: "lines+markers",
        line: { color: colour(s.look), width: 2.2, shape: "hv", dash: s.look.dash }, name: plain(s.name),
        marker: { symbol: s.look.symbol, size: 8, color: colour(s.look), maxdisplayed: 9 }, meta: "mean",
        hovertemplate: `%{fullData.name}<br>%{x:.4g} ${AXES[axis].split(" (")[0]}<br>` +
          (measure === "accuracy" ? "%{y:.2%}" : "loss %{y:.4g}") + "<extra></extra>",
      });
    });
    const more = {
      xaxis: { title: { text: AXES[axis], standoff: 8 }, type: log ? "log" : "linear", rangemode: "tozero" },
      yaxis: { title: { text: MEASURES[measure], standoff: 8 } },
    };
    if (log) Object.assign(more.xaxis, ticks(bands.flatMap((b) => b.x)));
    if (measure === "accuracy") {
      Object.assign(more.yaxis, { tickformat: ".0%", rangemode: "tozero" });
      if (target) {
        more.shapes = [{
          type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target,
          line: { color: css("--soft"), width: 1.5, dash: "dash" },
        }];
        more.annotations = [{
          xref: "paper", x: 1, y: target, xanchor: "left", yanchor: "middle", showarrow: false, align: "left",
          text: `target<br>${+(100 * target).toPrecision(4)} %`, font: { color: css("--soft"), size: 12 },
        }];
        more.margin = { r: 58 };  // beside the axes, where no curve runs through it
      }
    } else if (least > 0 && most > 20 * least) {
      Object.assign(more.yaxis, { type: "log" }, ticks(values));
    }
    place.setAttribute("aria-label", `${MEASURES[measure]} over ${AXES[axis]} of ${known.length} settings`);
    return draw(place, traces, more);
  }

  function themeButton(button, changed) {
    const order = ["", "light", "dark"];
    const words = { "": "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
    let at = 0;
    button.textContent = words[""];
    button.addEventListener("click", () => {
      at = (at + 1) % order.length;
      if (order[at]) document.documentElement.dataset.theme = order[at];
      else delete document.documentElement.dataset.theme;
      button.textContent = words[order[at]];
      changed();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  }

  /* Radio buttons that look like a switch. */
  function radios(place, name, choices, chosen, changed) {
    place.replaceChildren(...choices.map(([value, text, disabled]) => {
      const input = element("input", { type: "radio", name, value, checked: value === chosen, disabled: Boolean(disabled) });
      input.addEventListener("change", () => changed(value));
      return element("label", {}, input, element("span", {}, text));
    }));
  }

  return { AXES, css, dark, colour, narrow, plain, element, swatch, draw, band, faded, wantsLog, curves, themeButton, radios };
})();
