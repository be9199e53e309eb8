// What runs in the browser: controls write the URL, "/" finds a module, and cells of grids show text, never HTML.
(function () {
  const idle = window.requestIdleCallback || ((told) => setTimeout(told, 1));  // Safari has none

  // Appends the script that the page's head names.
  const load = (name) => new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.querySelector(`meta[name=${name}]`).content;
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${script.src} did not load`));
    document.head.appendChild(script);
  });

  // Nearly every page has a plot: their library comes while the first page is asked for, not before, as a browser has one thread
  // to compile scripts. dcc.Graph waits for what stands here; the library then puts itself in its place.
  // The first page of a server has asked for it already, before the server could send the rest.
  window.Plotly = new Promise((resolve, reject) => {
    const begin = (library) => { window.Plotly = library; drawSeenFirst(library); resolve(); };
    if (window.earlyPlots) window.earlyPlots.then(begin, () => null);
    document.addEventListener("DOMContentLoaded", () => {
      load("graph-library").catch(() => null);  // dcc.Graph asks for it again itself
      (window.earlyPlots || Promise.reject()).catch(() => load("plot-library").then(() => begin(window.Plotly), reject));
    });
  });

  // One cursor: a step that is chosen anywhere is marked in every plot over steps, and stays from page to page. It stands in the
  // address; only the module page shows other numbers at another step, and asks the server for them.
  const query = () => new URLSearchParams(window.location.search);
  const cursor = () => {
    const text = query().get("step");
    return text && Number.isFinite(Number(text)) ? Number(text) : null;
  };
  const silently = (values) => {
    const { pathname, search } = window.location;
    window.history.replaceState(window.history.state, "", pathname + changed(search, values));
  };
  // The place of x on the line through (from[i], to[i]), both rising.
  const between = (x, from, to) => {
    const last = from.length - 1;
    if (x <= from[0]) return to[0];
    if (x >= from[last]) return to[last];
    const i = from.findIndex((one) => one >= x);
    return to[i - 1] + ((x - from[i - 1]) / (from[i] - from[i - 1])) * (to[i] - to[i - 1]);
  };
  const stepAt = ({ steps, at }, x) => (steps ? between(x, at, steps) : x);
  const placeOfStep = ({ steps, at }, step) => (steps ? between(step, steps, at) : step);
  const axesOf = (layout) => {
    const names = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key));
    return names.length ? names : ["xaxis"];
  };
  const metaOf = (plot) => (plot.layout && plot.layout.meta) || {};
  const isHeat = (plot) => plot.parentElement.id === "heat";  // a click opens a module there, and a box asks for its steps
  const cursorShapes = (layout) => {
    const kept = (layout.shapes || []).filter((shape) => shape.name !== "cursor"), step = cursor(), meta = layout.meta || {};
    if (!meta.x || step === null || meta.cursor !== undefined) return kept;
    const x = placeOfStep(meta, step), line = { color: "#8a8f98", width: 1.4, dash: "dash" };
    return [...kept, ...axesOf(layout).filter((axis) => (layout[axis] || {}).visible !== false).map((axis) => {
      const n = axis.slice("xaxis".length);
      return { type: "line", name: "cursor", xref: "x" + n, x0: x, x1: x, yref: `y${n} domain`, y0: 0, y1: 1, line };
    })];
  };
  const withCursor = (layout) => ({ ...layout, shapes: cursorShapes(layout) });
  const stepPlots = () => Array.from(document.querySelectorAll(".js-plotly-plot")).filter((plot) => plot._fullLayout && metaOf(plot).x);
  const showCursor = () => {
    const step = cursor();
    window.dash_clientside.set_props("cursor", step === null ? { children: "", hidden: true }
      : { children: `step ${step.toLocaleString("en")} ✕`, hidden: false });
    for (const plot of stepPlots()) window.Plotly.relayout(plot, { shapes: cursorShapes(plot.layout) });
  };
  const setCursor = (step) => {
    if (window.location.pathname === "/module") set({ step }); else silently({ step });
    showCursor();
  };
  const choose = (plot, points) => {
    const x = points && points.length ? Number(points[0].x) : NaN;
    if (metaOf(plot).x && Number.isFinite(x) && !isHeat(plot)) setCursor(Math.round(stepAt(metaOf(plot), x)));
  };
  // The next point of the longest line from the cursor on, by key.
  const moveCursor = (offset) => {
    const lines = stepPlots().flatMap((plot) => (plot.calcdata || []).map((line) => ({ meta: metaOf(plot), line })));
    const longest = lines.reduce((best, one) => (one.line.length > (best ? best.line.length : 1) ? one : best), null);
    if (!longest) return;
    const xs = longest.line.map(({ x }) => x).filter(Number.isFinite);
    const steps = [...new Set(xs.map((x) => Math.round(stepAt(longest.meta, x))))].sort((a, b) => a - b), now = cursor();
    const beyond = offset > 0 ? steps.filter((one) => now === null || one > now) : steps.filter((one) => now === null || one < now).reverse();
    if (beyond.length) setCursor(beyond[0]);
  };
  window.addEventListener("popstate", () => setTimeout(showCursor, 0));

  // The plots of a page zoom together along x. The stretch stands in the address, in what x is.
  let isSharing = false;
  const zoomOf = () => {
    const ends = (query().get("zoom") || "").split("..").map(Number);
    return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
  };
  const leading = (layout) => axesOf(layout).filter((axis) => !(layout[axis] || {}).matches);
  const withZoom = (layout) => {
    const zoom = (layout.meta || {}).x && zoomOf();
    if (!zoom) return layout;
    const axes = leading(layout).map((axis) => [axis, { ...layout[axis], range: [...zoom], autorange: false }]);
    return { ...layout, ...Object.fromEntries(axes) };
  };
  const shareZoom = (library, plot, change) => {
    const key = Object.keys(change).find((one) => /^xaxis\d*\.(range|autorange)/.test(one));
    if (!key || isSharing || !metaOf(plot).x || isHeat(plot)) return;
    const axis = key.split(".")[0];
    const range = key.endsWith("autorange") ? null : plot.layout[axis].range.map((end) => Number(Number(end).toPrecision(7)));
    silently({ zoom: range && range.join("..") });
    isSharing = true;
    const others = stepPlots().filter((one) => !isHeat(one)).map((one) => {
      const own = leading(one.layout).filter((name) => one !== plot || name !== axis);
      const values = Object.fromEntries(own.map((name) => (range ? [`${name}.range`, [...range]] : [`${name}.autorange`, true])));
      return own.length ? library.relayout(one, values) : null;
    });
    Promise.all(others).finally(() => { isSharing = false; });
  };

  // The cells of a heatmap share a few texts: they come once, and each cell's place among them.
  const withTexts = (trace) => {
    const { words } = trace.meta || {}, { bdata, dtype, shape } = trace.text || {};
    if (!words || !bdata) return trace;
    const places = new (dtype === "u4" ? Uint32Array : Uint16Array)(Uint8Array.from(atob(bdata), (one) => one.charCodeAt(0)).buffer);
    const cells = Number(shape.split(",")[1]), text = [];
    for (let at = 0; at < places.length; at += cells) text.push(Array.from(places.subarray(at, at + cells), (place) => words[place]));
    return { ...trace, text };
  };

  // A plot in a narrow place: its subplots stand below each other, the entries of its legend too where a line has no room for
  // them, and its words are in lines that fit.
  const NARROW_PX = 600, ENTRY_PX = 45, ENTRY_LINE_PX = 19, TEXT_LINE_PX = 13, CELL_PX = 96, CELL_GAP_PX = 28;
  const pen = document.createElement("canvas").getContext("2d");
  const FACE = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif";
  const widthOf = (text, size = 11) => {
    pen.font = `${size}px ${FACE}`;
    return pen.measureText(text.replace(/<[^>]*>/g, "")).width;
  };
  const inLines = (text, width, size) => text.split(" ").reduce((lines, one) => {
    const longer = lines.length ? `${lines[lines.length - 1]} ${one}` : one;
    if (lines.length && widthOf(longer, size) <= width) lines[lines.length - 1] = longer;
    else lines.push(one);
    return lines;
  }, []);
  // Pixels of a plot or a grid are those of a window that is not scaled; style.css has the root's font grow with a wider one.
  const scale = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
  const roomOf = (plot) => { const box = plot.closest(".saved-plot"); return box ? box.clientWidth / scale() : NARROW_PX; };
  const MARGIN = { l: 56, r: 12, t: 8, b: 34 };  // of figures/plot.py
  const stacked = (layout) => {
    const cells = axesOf(layout).map((axis) => axis.slice("xaxis".length)).sort((a, b) => a - b)
      .map((n) => ({ n, x: (layout["xaxis" + n] || {}).domain || [0, 1], y: (layout["yaxis" + n] || {}).domain || [0, 1] }));
    if (!cells.some(({ x }) => x[0] > 0)) return layout;
    const height = cells.length * (CELL_PX + CELL_GAP_PX) - CELL_GAP_PX, margin = { ...MARGIN, ...layout.margin }, next = { ...layout };
    const before = layout.height - margin.t - margin.b;
    cells.forEach((cell, i) => {
      const top = 1 - (i * (CELL_PX + CELL_GAP_PX)) / height, isLast = i === cells.length - 1;
      cell.to = [Math.max(0, top - CELL_PX / height), top];
      next["xaxis" + cell.n] = { ...layout["xaxis" + cell.n], domain: [0, 1], ...(isLast ? {} : { showticklabels: false, title: { text: "" } }) };
      next["yaxis" + cell.n] = { ...layout["yaxis" + cell.n], domain: cell.to };
    });
    const within = (at, [low, high]) => at >= low - 1e-6 && at <= high + 1e-6;
    next.annotations = (layout.annotations || []).map((words) => {
      const isAtStep = words.xref !== "paper";
      const cell = words.yref === "paper" && cells.find(({ n, x, y }) => within(words.y, y) && (isAtStep ? words.xref === "x" + n : within(words.x, x)));
      if (!cell) return words;
      const { x, y, to } = cell, up = (words.y - y[0]) / (y[1] - y[0]);
      return { ...words, y: to[0] + up * (to[1] - to[0]), ...(isAtStep ? {} : { x: (words.x - x[0]) / (x[1] - x[0]) }) };
    });
    if (layout.legend) next.legend = { ...layout.legend, y: 1 + ((layout.legend.y - 1) * before) / height };
    return { ...next, height: height + margin.t + margin.b };
  };
  const fitted = (plot, data, layout) => {
    const room = roomOf(plot);
    if (room >= NARROW_PX || !layout.height) return { data, layout };
    const next = { ...stacked(layout) }, margin = { ...MARGIN, ...layout.margin };
    const entries = data.filter(({ showlegend, name }) => layout.showlegend && showlegend && name).map(({ name }) => widthOf(name) + ENTRY_PX);
    if (entries.reduce((sum, one) => sum + one, 0) > room - margin.l - margin.r) {
      const height = entries.length * ENTRY_LINE_PX + 12;
      next.legend = { ...next.legend, orientation: "v", maxheight: 2 * height };  // else it scrolls in half of the plot
      next.height += Math.max(0, height - margin.t);
      margin.t = Math.max(height, margin.t);
    }
    const end = ({ x, xref, xanchor, xshift }) => {  // where words begin that stand to the right of a place of an axis, if it is known
      const { range } = next[String(xref).replace("x", "xaxis")] || {};
      const at = xanchor === "left" && range ? (x - range[0]) / (range[1] - range[0]) : NaN;
      return margin.l + at * (room - margin.l - margin.r) + (xshift || 0);
    };
    for (const words of next.annotations || []) {
      const over = end(words) > 0.8 * room ? end(words) + widthOf(words.text, (words.font || {}).size) - room : 0;
      margin.r = Math.max(margin.r, MARGIN.r + over);
    }
    const inner = room - margin.l - margin.r, lower = {};  // words about a gap stand below each other, at a step with 0.4 of the room
    next.annotations = (next.annotations || []).map((words) => {
      const isGap = words.yanchor === "top" && words.xref !== "paper", by = isGap ? lower[words.xref] || 0 : 0;
      const rest = Number.isFinite(end(words)) && end(words) <= 0.8 * room ? room - MARGIN.r - end(words) : inner;
      const lines = inLines(words.text, isGap ? 0.4 * inner : rest, (words.font || {}).size);
      if (isGap) lower[words.xref] = by + (lines.length - 1) * TEXT_LINE_PX;
      return { ...words, text: lines.join("<br>"), yshift: (words.yshift || 0) - by };
    });
    return { data, layout: { ...next, margin, meta: { ...next.meta, isFitted: true } } };
  };
  const isNarrow = (plot) => roomOf(plot) < NARROW_PX;

  // A figure with all that it has in pixels multiplied: fonts, margins, lines, markers, distances. Its data stay as they are.
  const IN_PX = new Set(["size", "standoff", "ticklen", "ticklabelstandoff", "xshift", "yshift", "xpad", "ypad", "thickness",
    "height", "maxheight", "itemwidth", "l", "r", "t", "b"]);
  const DATA = new Set(["x", "y", "z", "text", "customdata", "meta", "words", "domain", "range", "colorscale", "modebar"]);
  const times = (part, by, name) => {
    if (Array.isArray(part)) return part.map((one) => times(one, by));
    if (!part || typeof part !== "object" || ArrayBuffer.isView(part)) return part;
    return Object.fromEntries(Object.entries(part).map(([key, value]) => {
      const isInPx = IN_PX.has(key) || (key === "width" && name === "line");  // that of a bar is in what x is
      if (typeof value === "number") return [key, !isInPx ? value : key === "ticklabelstandoff" ? Math.round(value * by) : value * by];
      return [key, DATA.has(key) ? value : times(value, by, key)];
    }));
  };
  // As many ticks as plotly gives an axis of so many pixels: it would give more to the same axis with larger words.
  const ticksOf = (pixels, each) => Math.round(Math.min(9, Math.max(4, pixels / each))) + 1;
  const magnified = ({ data, layout }, by, room) => {
    if (by === 1 || !layout.height) return { data, layout };
    const margin = { ...MARGIN, ...layout.margin }, legend = { itemwidth: 30, ...layout.legend };
    const next = times({ ...layout, margin, legend }, by);
    for (const name of axesOf(layout).flatMap((axis) => [axis, axis.replace("x", "y")])) {
      const { domain: [low, high] = [0, 1], nticks, tickvals, dtick } = layout[name] || {}, isX = name[0] === "x";
      const pixels = (high - low) * (isX ? room - margin.l - margin.r : layout.height - margin.t - margin.b);
      if (!nticks && !tickvals && !dtick) next[name] = { ...next[name], nticks: ticksOf(pixels, isX ? 80 : 40) };
    }
    return { data: times(data, by), layout: { ...next, meta: { ...layout.meta, isFitted: true } } };
  };

  // What is below the fold is drawn when the browser has nothing else to do: a plot takes it 50 ms, and the first one is looked at.
  const drawSeenFirst = (library) => {
    // dcc.Graph writes a zoom into its figure, where it counts as asked for by the server: plotly would take it back with the next
    // figure of a live run, which has none. What the reader zoomed to stays as long as the plot shows the same.
    const revision = (layout, axis) => (layout[axis] && layout[axis].uirevision) || layout.uirevision;
    const remember = (plot) => (change) => {
      shareZoom(library, plot, change);
      for (const [key, value] of Object.entries(change)) {
        const [, axis, what] = /^([xy]axis\d*)\.(range|autorange)/.exec(key) || [];
        if (what === "autorange") delete plot.zooms[axis];
        else if (axis) plot.zooms[axis] = { range: [...plot.layout[axis].range], of: revision(plot.layout, axis) };
      }
    };
    const zoomed = (plot, layout) => {
      const kept = structuredClone(layout);
      for (const [axis, { range, of }] of Object.entries(plot.zooms || {})) {
        if (of !== revision(kept, axis)) delete plot.zooms[axis];
        else kept[axis] = { ...kept[axis], range: [...range], autorange: false };
      }
      return kept;
    };
    // A plot that comes without options of its own uploads nothing either.
    library.setPlotConfig({ displaylogo: false, showSendToCloud: false, showEditInChartStudio: false, showLink: false,
      showTips: false, sendData: false, plotlyServerURL: "", topojsonURL: "" });
    const react = library.react, waiting = new Map();
    // dcc.Graph takes what is drawn for what it was given, and may have it drawn again: all of it, or, once something has been
    // zoomed or moved, its axes and legend with the lines of the figure before. What the server sends has lines of its own.
    const seen = (plot, asked) => {
      const isAgain = plot.given && (metaOf(asked).isFitted || asked.data === plot.given.figure.data);
      const figure = isAgain ? plot.given.figure : asked;
      const { data, layout } = magnified(fitted(plot, figure.data.map(withTexts), figure.layout), scale(), roomOf(plot));
      plot.given = { figure, isNarrow: isNarrow(plot), scale: scale() };
      return { ...figure, data, layout: withCursor(withZoom(zoomed(plot, layout))) };
    };
    const draw = (plot, figure) => react(plot, seen(plot, figure)).then((drawn) => {
      const box = plot.closest(".saved-plot");
      if (box) box.classList.toggle("saved-nothing", !figure.data.length);  // it says why it is empty: no picture to save
      if (!plot.zooms) {
        plot.zooms = {};
        plot.on("plotly_relayout", remember(plot));
        plot.on("plotly_click", ({ points }) => choose(plot, points));
      }
      return drawn;
    });
    // plotly keeps ticks and titles of what turns or moves: all is taken away before.
    const redraw = async (plot) => {
      const { figure, isNarrow: wasNarrow, scale: before } = plot.given;
      const turns = isNarrow(plot) !== wasNarrow || scale() !== before;
      if (turns) await react(plot, { ...figure, data: [], layout: { height: plot.clientHeight } });
      if (turns || wasNarrow) await draw(plot, figure);
      const { legend } = plot.layout;  // it stays where it was until its place is set by itself
      if (legend && legend.y !== undefined) await library.relayout(plot, { "legend.y": legend.y });
      if (turns) await library.Plots.resize(plot);
    };
    let turning;
    window.addEventListener("resize", () => {
      clearTimeout(turning);
      turning = setTimeout(() => {
        for (const plot of document.querySelectorAll(".js-plotly-plot")) {
          if (plot.given && roomOf(plot) > 0) plot.turned = Promise.resolve(plot.turned).then(() => redraw(plot)).catch(() => null);
        }
      }, 300);  // dcc.Graph fits its plots to the window before
    });
    const next = () => {
      const [plot, { figure, done }] = waiting.entries().next().value;
      waiting.delete(plot);
      const drawn = plot.isConnected ? draw(plot, figure) : Promise.resolve(plot);
      done.forEach((told) => told(drawn));
      if (waiting.size) soon();
    };
    const soon = () => idle(next, { timeout: 300 });
    library.react = (plot, figure) => {
      if (plot._fullLayout || plot.getBoundingClientRect().top < window.innerHeight) return draw(plot, figure);
      return new Promise((told) => {
        if (!waiting.size) soon();
        const earlier = waiting.get(plot);
        waiting.set(plot, { figure, done: [...(earlier ? earlier.done : []), told] });
      });
    };
  };

  // Where a plot is drawn anew between the press of a button and its release, plotly forgets what lies under the pointer, and the
  // click would be lost: what was pressed is what is clicked.
  let pressed = null;
  const at = (event) => [event.clientX, event.clientY].map(Math.round).join();
  window.addEventListener("mousedown", (event) => {
    const plot = event.target.closest && event.target.closest(".js-plotly-plot");
    pressed = plot && plot._hoverdata ? { plot, points: plot._hoverdata, at: at(event) } : null;
  }, true);
  window.addEventListener("mouseup", (event) => {
    const { plot, points, at: before } = pressed || {};
    if (plot && before === at(event) && !plot._hoverdata) plot.emit("plotly_click", { points, event });
    pressed = null;
  }, true);

  // Resolves when the plots that are seen have been painted, at the latest after two seconds.
  const painted = async () => {
    await Promise.resolve(window.Plotly).catch(() => null);
    const isWaiting = (plot) => !plot.querySelector(".main-svg") && plot.getBoundingClientRect().top < window.innerHeight;
    const until = performance.now() + 2000;
    do await new Promise((told) => idle(told, { timeout: 200 }));
    while (performance.now() < until && Array.from(document.querySelectorAll(".plot")).some(isWaiting));
    await new Promise((told) => { requestAnimationFrame(() => setTimeout(told, 20)); setTimeout(told, 200); });  // a hidden page has no frames
  };

  // Tables stand below the plots: what draws them comes with the first, after the plots. It takes the page 0.25 s, and an empty
  // table is its words: it waits until who clicks on something right away has got it, or until it has rows.
  const EMPTY_TABLE_MS = 3000;
  let table = null, tableLibrary = null;
  const loadTables = async () => {
    if (document.querySelector(".plot")) await painted();
    await load("grid-library");
    table = window.dash_ag_grid.AgGrid;
    window.dash_ag_grid = { ...window.dash_ag_grid, AgGrid };
  };
  // The least and largest widths of columns are for words of the size of a window that is not scaled.
  const inColumns = (columns, by) => (by === 1 ? columns : columns.map(({ minWidth, maxWidth, ...column }) =>
    ({ ...column, minWidth: minWidth * by, ...(maxWidth ? { maxWidth: maxWidth * by } : {}) })));
  function AgGrid(props) {
    const [drawn, draw] = window.React.useState(() => table), [isMissing, miss] = window.React.useState(false);
    const [by, magnify] = window.React.useState(scale);
    const isEmpty = !(props.rowData || []).length;
    window.React.useEffect(() => {
      const look = () => magnify(scale());
      window.addEventListener("resize", look);
      return () => window.removeEventListener("resize", look);
    }, []);
    window.React.useEffect(() => {
      let isHere = true;
      const load = () => {
        tableLibrary = tableLibrary || loadTables().catch((error) => { tableLibrary = null; throw error; });  // the next page tries again
        tableLibrary.then(() => isHere && draw(() => table), () => isHere && miss(true));
      };
      const waiting = isEmpty && !tableLibrary ? setTimeout(load, EMPTY_TABLE_MS) : load();
      return () => { isHere = false; clearTimeout(waiting); };
    }, [isEmpty]);
    const columnDefs = window.React.useMemo(() => inColumns(props.columnDefs, by), [props.columnDefs, by]);
    if (drawn) return window.React.createElement(drawn, { ...props, columnDefs });
    const words = isEmpty ? props.dashGridOptions.localeText.noRowsToShow : null;
    if (!isMissing) return window.React.createElement("div", { className: "grid-to-come" }, words);
    return window.React.createElement("div", { className: "problems", role: "alert" }, "The tables did not load: reload the page.");
  }
  window.dash_ag_grid = { AgGrid, getApi: () => null };

  // The address bar is the state: read and written here at once, never through a callback that may lag behind it.
  const go = (pathname, search, isSameEntry) => {
    if (pathname + search === window.location.pathname + window.location.search) return;
    window.history[isSameEntry ? "replaceState" : "pushState"]({}, "", pathname + search);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));  // dcc.Location listens to it, as for dcc.Link
  };

  const visit = (pathname, search) => { go(pathname, search); window.scrollTo(0, 0); };

  // Sets the query's keys; what is null, empty or default is left out.
  const changed = (search, values) => {
    const params = new URLSearchParams(search || "");
    if ("x" in values && word(values.x) !== word(params.get("x"))) params.delete("zoom");  // it is in what x is
    for (const [key, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") params.delete(key);
      else params.set(key, value);
    }
    const text = params.toString();
    return text ? "?" + text : "";
  };
  const set = (values) => go(window.location.pathname, changed(window.location.search, values));
  const word = (value) => (Array.isArray(value) ? value.join("~") : String(value ?? ""));

  // What decides the layout of a page, as urls.py has it; the other settings only decide what its figures show.
  const placeOf = (pathname, search) => {
    const params = new URLSearchParams(search || "");
    return JSON.stringify([pathname, params.get("run"), params.get("module")]);
  };
  // The last layout that was asked for. It is on screen once "here" holds its number.
  let layout = { n: 0, place: null };
  const isOnScreen = (here) => Boolean(here) && here.n === layout.n;
  const agrees = (search, values, ids) => {
    const params = new URLSearchParams(search || "");
    return ids.every((id, i) => word(params.get(id.control) ?? id.default) === word(values[i]));
  };

  // A slider passes through many values: the last is always asked for, those between as fast as they are answered, and all of
  // one move are one entry of the history: what happens while a button is held, and what follows a value within a second.
  // By the time that an address is seen here the slider is elsewhere.
  const MOVE_MS = 1000, UNANSWERED_MS = 600, BETWEEN_MS = 50;
  let looked = { n: 0, times: 0 };
  let written = { address: null, keys: null, at: -Infinity, isAnswered: true, grip: 0 }, waiting = null, timer;
  let grip = 0, isHeld = false;
  window.addEventListener("pointerdown", () => { grip += 1; isHeld = true; }, true);
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { isHeld = false; }, true);
  window.addEventListener("popstate", () => { written.address = null; });
  const sync = (values, ids, here) => {
    clearTimeout(timer);
    waiting = null;
    const { pathname, search } = window.location;
    if (!ids.length || !isOnScreen(here) || placeOf(pathname, search) !== layout.place) return;
    const wanted = {};
    ids.forEach((id, i) => { wanted[id.control] = word(values[i]) === word(id.default) ? null : word(values[i]); });
    const now = new URLSearchParams(search), isNew = (key) => key in wanted && word(wanted[key]) !== word(now.get(key));
    if (["fold", "sort", "filter"].some(isNew)) wanted.rows = null;  // the rows of a heatmap are numbered in their order
    if (isNew("fold")) wanted.open = null;
    const known = new URLSearchParams(search), next = new URLSearchParams(changed(search, wanted));
    if (next.toString() === known.toString()) return;
    const keys = Object.keys(wanted).filter((key) => known.get(key) !== next.get(key)).join(" ");
    const since = performance.now() - written.at, isSameGrip = isHeld && grip === written.grip;
    const isSameMove = keys === written.keys && (since < MOVE_MS || isSameGrip);
    const wait = isSameMove ? (written.isAnswered ? BETWEEN_MS : UNANSWERED_MS) - since : 0;
    if (wait > 0) {
      waiting = [values, ids, here];
      timer = setTimeout(sync, wait, ...waiting);
      return;
    }
    written = { address: pathname + changed(search, wanted), keys, at: performance.now(), isAnswered: false, grip };
    go(pathname, changed(search, wanted), isSameMove);
  };

  // The runs that are ticked for a comparison, in that order. A grid's own selection goes through its properties and may come back
  // as it was before a tick, when its rows were set meanwhile.
  const ticked = new Set();
  const chosen = () => {
    const names = [...ticked];
    if (names.length < 2) return "tick two or more to compare them";
    const search = changed("", { run: names[0], with: names.slice(1).join("/") });
    const link = { href: "/compare" + search, children: "compare " + names.join(" with ") };
    return { namespace: "dash_core_components", type: "Link", props: link };
  };

  const plainText = (label) => label.replace(/%&#123;/g, "%{").replace(/&lt;/g, "<").replace(/&amp;/g, "&");

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    fp8debug: {
      // A control that moved leaves the layout: [none, asked]. Another place, or "back" to other settings: [place, asked].
      arrive(pathname, search, here, known, values, ids) {
        const none = window.dash_clientside.no_update;
        if (pathname === undefined || pathname === null) return [none, none];
        const isFirst = !layout.n && here && known;  // the page came with the shell
        if (isFirst) layout = { n: here.n, place: placeOf(known.pathname, known.search) };
        const place = placeOf(pathname, search);
        const isOurs = pathname + (search || "") === written.address || agrees(search, values, ids);
        const stays = place === layout.place && isOnScreen(here) && isOurs;
        if (isFirst && stays && known.search === (search || "")) return [none, none];
        if (!stays) layout = { n: layout.n + 1, place };
        const asked = { pathname, search: search || "", n: layout.n };
        return [stays ? none : asked, asked];
      },
      sync,
      answered() {
        written.isAnswered = true;
        if (waiting) sync(...waiting);
      },
      // What takes long is asked for when the page has been painted, and the browser has a moment.
      async look(here, asked) {
        if (!here || !asked || here.n !== asked.n) return window.dash_clientside.no_update;
        await painted();
        for (const until = performance.now() + UNANSWERED_MS; !written.isAnswered && performance.now() < until;) {
          await new Promise((told) => setTimeout(told, 20));
        }
        const isFirst = looked.n !== here.n;
        looked = { n: here.n, times: looked.times + 1 };
        return { ...looked, isFirst };
      },
      // The search of modules came without them; they are asked for when the page has been painted.
      unlisted(seen) {
        const isThere = seen && document.getElementById("module-search");  // the list of runs has none
        const search = isThere && window.dash_component_api.getLayout("module-search");
        const isFull = search && search.props.data && search.props.data.length;
        return search && !isFull ? seen : window.dash_clientside.no_update;
      },
      // One title for each page and run; the browser lists tabs and history by it.
      entitle(here) { if (here && here.title) document.title = here.title; },
      reload(now) { if (now) window.location.reload(); },
      pause(follow) { return !follow; },
      search_runs(text) {
        const search = document.getElementById("runs-search");
        if (!search) return;
        if ((query().get("q") || "") !== (text || "")) silently({ q: text || null });
        const runs = window.dash_ag_grid.getApi("runs");
        if (runs) runs.setGridOption("quickFilterText", text || "");
      },
      open_module(name) {
        if (!name) return;
        window.dash_clientside.set_props("module-search", { value: null });
        visit("/module", changed(window.location.search, { module: name }));
      },
      open_cell(click) {
        const point = click && click.points && click.points[0];
        if (!point || !Number.isFinite(Number(point.x)) || point.y === undefined) return;
        const now = new URLSearchParams(window.location.search);
        const meta = metaOf(document.querySelector("#heat .js-plotly-plot"));
        if (meta.folds.includes(point.y)) {
          const opened = (now.get("open") || "").split("~").filter(Boolean);
          set({ open: [...opened, plainText(String(point.y))].join("~"), rows: null });
          return;
        }
        // A health says which metric at which site is worst.
        const [, metric, worst] = /(\w+) at (\w+\.\w+)/.exec(point.text || "") || [];
        const site = worst || now.get("site");
        visit("/module", changed("", { run: now.get("run"), module: plainText(String(point.y)), step: Math.round(stepAt(meta, Number(point.x))),
          metric: metric || now.get("metric"), site: site && site.includes(".") ? site : null }));
      },
      // A box drawn in the heatmap asks for its steps at full resolution; a double click takes the range away again.
      zoom(change) {
        const plot = document.querySelector("#heat .js-plotly-plot");
        if (!change || !plot) return;
        const ends = (axis) => [0, 1].map((i) => Number(change[`${axis}axis.range[${i}]`]));
        const steps = ends("x").map((x) => stepAt(metaOf(plot), x)), rows = ends("y"), wanted = {};
        if (steps.every(Number.isFinite)) {
          const [from, to] = [Math.max(0, Math.ceil(Math.min(...steps))), Math.max(0, Math.floor(Math.max(...steps)))];
          if (to >= from) Object.assign(wanted, { from, to });
        } else if (change["xaxis.autorange"]) Object.assign(wanted, { from: null, to: null });
        const num = plot._fullLayout.yaxis._categories.length;
        if (rows.every(Number.isFinite) && num) {
          // Row i is drawn from i - 0.5 to i + 0.5; one of which a tenth is in the box is not meant.
          const low = Math.max(0, Math.floor(Math.min(...rows) + 0.6)), high = Math.min(num - 1, Math.ceil(Math.max(...rows) - 0.6));
          const first = Number((new URLSearchParams(window.location.search).get("rows") || "0").split(":")[0]) || 0;
          if (high >= low && high - low + 1 < num) wanted.rows = `${first + low}:${first + high}`;
        } else if (change["yaxis.autorange"]) wanted.rows = null;
        if (Object.keys(wanted).length) set(wanted);
      },
      // The list may be set anew at any time: a run that is gone is no longer ticked.
      listed(rows) {
        const names = (rows || []).map((row) => row.name);
        for (const name of [...ticked]) if (!names.includes(name)) ticked.delete(name);
        return chosen();
      },
      // A note is about what the address bar says: its module, and the step of the cursor.
      noted(added, deleted, text) {
        const [cause] = window.dash_clientside.callback_context.triggered || [];
        if (!cause || !cause.value) return window.dash_clientside.no_update;
        const { pathname, search: given } = window.location, heading = document.querySelector("h1");
        const search = pathname === "/module" ? changed(given, { module: heading && heading.textContent }) : given;
        const key = cause.prop_id.startsWith("{") ? JSON.parse(cause.prop_id.replace(/\.n_clicks$/, ""))["note-delete"] : null;
        return { pathname, search, key, text: text || "", at: performance.now() };
      },
      open_run(values, ids) {
        if (ids.length && values[0] && values[0] !== ids[0]["run-of"]) go(window.location.pathname, changed("", { run: values[0] }));
      },
    },
  });

  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  functions.pageBody = () => document.body;
  const grades = ["ok", "unknown", "info", "warning", "error"];
  functions.bySeverity = (a, b) => grades.indexOf(a) - grades.indexOf(b);
  // "NaN" comes as text; it is worse than any number, and what is not there better.
  const rank = (value) => (value === null || value === undefined ? -Infinity : Number.isNaN(Number(value)) ? Infinity : Number(value));
  // A setting is a number in one run and a word in another: numbers first, and what a run has not last.
  const order = (value) => (value === null || value === undefined ? 2 : typeof value === "number" ? 0 : 1);
  functions.bySetting = (a, b) => order(a) - order(b)
    || (order(a) === 0 ? a - b : order(a) === 1 ? String(a).localeCompare(String(b)) : 0);
  functions.byNumber = (a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b));

  const grid = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  grid.Link = function (props) {
    const target = props.data.href;
    if (!target || !target.startsWith("/")) return String(props.value ?? "");
    const follow = (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      const [pathname, search] = target.split(/(?=\?)/);
      visit(pathname, search || "");
    };
    return window.React.createElement("a", { href: target, onClick: follow }, String(props.value ?? ""));
  };
  grid.Tick = function (props) {
    const { name, href } = props.data;
    const [isTicked, tick] = window.React.useState(ticked.has(name));
    const change = ({ target: { checked } }) => {
      if (checked) ticked.add(name); else ticked.delete(name);
      tick(checked);
      window.dash_clientside.set_props("compare-chosen", { children: chosen() });
    };
    const box = { type: "checkbox", checked: isTicked, onChange: change, "aria-label": "tick " + name, tabIndex: -1 };
    return href ? window.React.createElement("input", box) : null;
  };
  grid.Line = function ({ data: { line, lineWords } }) {
    if (!line || !line.startsWith("data:image/svg+xml,")) return "\u2013";
    return window.React.createElement("img", { src: line, alt: lineWords, title: lineWords, className: "sparkline" });
  };
  grid.Severity = function (props) {
    const icon = window.React.createElement("span", { className: "icon", "aria-hidden": true }, props.data.icon);
    return window.React.createElement("span", { className: "badge badge-" + props.value }, icon,
      window.React.createElement("span", null, props.data.word));
  };

  // Mantine's choices are combo boxes but do not say so: to a screen reader they would be text that happens to have a list.
  const asComboBox = (input) => {
    const isOpen = input.dataset.expanded === "true";
    const list = isOpen && Array.from(document.querySelectorAll("[role=listbox]")).find((one) => one.checkVisibility());
    input.setAttribute("role", "combobox");
    input.setAttribute("aria-expanded", String(isOpen));
    if (list) input.setAttribute("aria-controls", list.id); else input.removeAttribute("aria-controls");
  };
  new MutationObserver((changes) => changes.forEach(({ target }) => requestAnimationFrame(() => asComboBox(target))))
    .observe(document, { subtree: true, attributeFilter: ["data-expanded"] });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const inside = { Enter: "a, input", " ": "input" }[event.key];  // the grid moves its focus from cell to cell
    const target = inside && event.target.matches(".ag-cell") && event.target.querySelector(inside);
    if (target) { event.preventDefault(); target.click(); }
    const search = document.getElementById("module-search") || document.getElementById("runs-search");
    if (event.key === "/" && search) { event.preventDefault(); search.focus(); search.click(); }
    const offset = { "[": -1, "]": 1 }[event.key];
    if (offset) step(offset);
    const move = { ",": -1, ".": 1 }[event.key];
    if (move) moveCursor(move);
    if (event.key === "Escape" && cursor() !== null) setCursor(null);
  });

  // The next module in execution order from the one in the address, whatever of it is drawn by now.
  const step = (offset) => {
    const { pathname, search } = window.location;
    const found = pathname === "/module" && window.dash_component_api.getLayout("module-search");
    const heading = document.querySelector("h1");
    const shown = new URLSearchParams(search).get("module") || (heading && heading.textContent);
    const modules = (found && found.props.data) || [];
    const at = modules.indexOf(shown);
    if (at >= 0 && modules[at + offset]) go(pathname, changed(search, { module: modules[at + offset] }));
  };

  // Files: a table as CSV, a plot as PNG or SVG on the page's own background.
  const save = (text, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  };
  // A spreadsheet runs a cell that begins with one of these; a number may.
  const cell = (text) => {
    const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? "'" + text : text;
    return /[",\n\r]/.test(safe) ? '"' + safe.replace(/"/g, '""') + '"' : safe;
  };
  // Numbers as programs read them: no thousands' commas, shares as fractions, nothing for "no data", columns by their names.
  const plainCell = (one) => {
    const named = one.querySelector("abbr[title]");
    if (named) return named.title;
    const copy = one.cloneNode(true);
    if (/\d|NaN|Inf/.test(copy.textContent)) copy.querySelectorAll(".icon").forEach((icon) => icon.remove());
    const text = copy.textContent.trim(), bare = text.replace(/,(?=\d{3}(\D|$))/g, "");
    if (text === "\u2013") return "";
    if (/^-?[\d.]+(e[+-]?\d+)?%$/.test(bare)) return String(Number((Number(bare.slice(0, -1)) / 100).toPrecision(12)));
    return /^-?\d[\d,]*(\.\d+)?$/.test(text) ? bare : text;
  };
  const tableCsv = (table) => Array.from(table.rows, (row) =>
    Array.from(row.cells, (one) => cell(plainCell(one))).join(",")).join("\n") + "\n";
  // What a file is of: the run, and what the page is about.
  const fileName = (...words) => words.filter(Boolean).join(" ").replace(/[^\w.+=-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 150);
  const runName = () => query().get("run") || (document.title.split(" · ").slice(-2)[0] || "");
  // What a page's own controls choose, whether the address says it or it is the default.
  const CHOICES = ["with", "site", "metric"];
  const chosenWords = () => CHOICES.map((name) => {
    const one = document.querySelector(`[id*='"control":"${name}"']`);
    return one ? query().get(name) || JSON.parse(one.id.slice(0, one.id.lastIndexOf("}") + 1)).default : "";
  });
  const saveGrid = (id) => {
    const api = window.dash_ag_grid.getApi(id);
    if (!api) return;
    api.exportDataAsCsv({
      fileName: fileName(runName(), id, query().get("of"), ...chosenWords()) + ".csv",
      columnKeys: api.getAllDisplayedColumns().filter((one) => one.getColDef().field),  // not the boxes to tick
      processCellCallback: (one) => String(one.value ?? "").replace(/^(?=[=+@\t\r]|-\D)/, "'"),
    });
  };
  // A picture says what it is of: run, site and metric, and the steps that are seen, in its title and its name.
  const aboutOf = (plot) => {
    const meta = metaOf(plot), words = [...(meta.about || [runName(), plot.parentElement.id])];
    const axis = meta.x && plot._fullLayout.xaxis;
    if (axis) {
      const xs = (plot.calcdata || []).flatMap((line) => line.map(({ x }) => x)).filter(Number.isFinite);
      const [low, high] = xs.length ? [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))] : axis.range;
      const ends = axis.range.map((end) => Math.round(stepAt(meta, Math.min(high, Math.max(low, Number(end))))));
      words.push(ends.every(Number.isFinite) ? `steps ${ends[0]} to ${ends[1]}` : "");
    }
    return words.filter(Boolean);
  };
  const HEAD_PX = 14, HEAD_LINE_PX = 16, HEAD_FONT_PX = 13, HEAD_PAD_PX = [12, 8];
  const savePicture = (id, format) => {
    const plot = document.querySelector(`[id="${id}"] .js-plotly-plot`), words = aboutOf(plot);
    const style = getComputedStyle(document.body), { margin, font } = plot._fullLayout;
    const by = scale(), [left, top] = HEAD_PAD_PX.map((pad) => pad * by), size = HEAD_FONT_PX * by;
    const lines = inLines(words.join(" · "), plot.clientWidth - 2 * left, size), head = (HEAD_PX + lines.length * HEAD_LINE_PX) * by;
    const text = lines.map((one) => one.replace(/&/g, "&amp;").replace(/</g, "&lt;")).join("<br>");
    const layout = { ...plot.layout, paper_bgcolor: style.backgroundColor, font: { ...font, color: style.color, family: FACE },
      margin: { ...margin, t: margin.t + head }, height: plot.clientHeight + head,
      title: { text, x: 0, xref: "container", xanchor: "left", pad: { l: left, t: top }, y: 1, yref: "container", yanchor: "top",
        font: { size, family: FACE, color: style.color } } };
    layout.annotations = (layout.annotations || []).map((note) => ({ ...note, bgcolor: style.backgroundColor }));
    window.Plotly.downloadImage({ data: plot.data, layout },
      { format, scale: format === "png" ? 2 : 1, filename: fileName(...words), width: plot.clientWidth, height: layout.height });
  };
  // A page that did not come by https or from this machine has no clipboard; the text is selected there.
  const copy = async (button, source) => {
    window.getSelection().selectAllChildren(source);
    const isCopied = await Promise.resolve(navigator.clipboard).then((board) => board.writeText(source.textContent))
      .then(() => true, () => document.execCommand("copy"));
    const before = button.textContent;
    button.textContent = isCopied ? "Copied" : "Selected: press Ctrl-C";
    button.disabled = true;
    setTimeout(() => { button.textContent = before; button.disabled = false; }, 1500);
  };
  // From page to page go the cursor, and how the axes are drawn.
  const KEPT = ["step", "x", "y", "smooth"];
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest("#tabs a");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    const now = query(), kept = Object.fromEntries(KEPT.filter((key) => now.has(key)).map((key) => [key, now.get(key)]));
    if (!Object.keys(kept).length) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    document.querySelector(".top").classList.remove("menu-open");
    const { pathname, search } = new URL(link.href);
    visit(pathname, changed(search, kept));
  }, true);
  document.addEventListener("click", (event) => {
    if (event.target.closest && event.target.closest("#cursor")) setCursor(null);
    const menu = event.target.closest && event.target.closest("#menu");
    const head = document.querySelector(".top");
    const isOpen = Boolean(menu) && !head.classList.contains("menu-open");
    head.classList.toggle("menu-open", isOpen);  // a click elsewhere, on a page say, closes it
    const opener = document.getElementById("menu");
    if (opener) opener.setAttribute("aria-expanded", String(isOpen));
    const button = event.target.closest && event.target.closest("button.save, [data-copy]");
    if (!button) return;
    const { copy: text, png, svg, csv, csvGrid, about } = button.dataset;
    if (text) copy(button, document.getElementById(text));
    else if (png || svg) savePicture(png || svg, png ? "png" : "svg");
    else if (csv) save(tableCsv(button.parentElement.querySelector("table")), fileName(runName(), csv, about));
    else if (csvGrid) saveGrid(csvGrid);
  });
})();
