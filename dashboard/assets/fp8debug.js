// What runs in the browser: controls write the URL, "/" finds a module, and cells of grids show text, never HTML.
(function () {
  // Nearly every page has a plot: their library comes while the first page is asked for, not before, as a browser has one thread
  // to compile scripts. dcc.Graph waits for what stands here; the library then puts itself in its place.
  window.Plotly = new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.querySelector("meta[name=plot-library]").content;
    script.onload = () => { drawSeenFirst(window.Plotly); resolve(); };
    script.onerror = () => reject(new Error("the plot library did not load"));
    document.addEventListener("DOMContentLoaded", () => document.head.appendChild(script));
  });

  // What is below the fold is drawn when the browser has nothing else to do: a plot takes it 50 ms, and the first one is looked at.
  const drawSeenFirst = (library) => {
    const draw = library.react, waiting = new Map();
    const next = () => {
      const [plot, { figure, done }] = waiting.entries().next().value;
      waiting.delete(plot);
      const drawn = plot.isConnected ? draw(plot, figure) : Promise.resolve(plot);
      done.forEach((told) => told(drawn));
      if (waiting.size) soon();
    };
    const soon = () => requestIdleCallback(next, { timeout: 300 });
    library.react = (plot, figure) => {
      if (plot._fullLayout || plot.getBoundingClientRect().top < window.innerHeight) return draw(plot, figure);
      return new Promise((told) => {
        if (!waiting.size) soon();
        const earlier = waiting.get(plot);
        waiting.set(plot, { figure, done: [...(earlier ? earlier.done : []), told] });
      });
    };
  };

  // The address bar is the state: read and written here at once, never through a callback that may lag behind it.
  const go = (pathname, search) => {
    if (pathname + search === window.location.pathname + window.location.search) return;
    window.history.pushState({}, "", pathname + search);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));  // dcc.Location listens to it, as for dcc.Link
  };

  const visit = (pathname, search) => { go(pathname, search); window.scrollTo(0, 0); };

  // Sets the query's keys; what is null, empty or default is left out.
  const changed = (search, values) => {
    const params = new URLSearchParams(search || "");
    for (const [key, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") params.delete(key);
      else params.set(key, value);
    }
    const text = params.toString();
    return text ? "?" + text : "";
  };
  const set = (values) => go(window.location.pathname, changed(window.location.search, values));
  const word = (value) => String(value ?? "");

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
  const plainText = (label) => label.replace(/%&#123;/g, "%{").replace(/&lt;/g, "<").replace(/&amp;/g, "&");

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    fp8debug: {
      // A control that moved leaves the layout: [none, asked]. Another place, or "back" to other settings: [place, asked].
      arrive(pathname, search, here, values, ids) {
        const none = window.dash_clientside.no_update;
        if (pathname === undefined || pathname === null) return [none, none];
        const place = placeOf(pathname, search);
        const stays = place === layout.place && isOnScreen(here) && agrees(search, values, ids);
        if (!stays) layout = { n: layout.n + 1, place };
        const asked = { pathname, search: search || "", n: layout.n };
        return [stays ? none : asked, asked];
      },
      sync(values, ids, here) {
        const { pathname, search } = window.location;
        if (!ids.length || !isOnScreen(here) || placeOf(pathname, search) !== layout.place) return;
        const wanted = {};
        ids.forEach((id, i) => { wanted[id.control] = word(values[i]) === word(id.default) ? null : values[i]; });
        const known = new URLSearchParams(search).toString();
        if (new URLSearchParams(changed(search, wanted)).toString() !== known) set(wanted);
      },
      pause(follow) { return !follow; },
      search_runs(text) {
        const runs = document.getElementById("runs") && window.dash_ag_grid.getApi("runs");
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
        const site = now.get("site");
        visit("/module", changed("", { run: now.get("run"), module: plainText(String(point.y)), step: Math.trunc(Number(point.x)),
          metric: now.get("metric"), site: site && site.includes(".") ? site : null }));
      },
      // A box drawn in the heatmap asks for its steps at full resolution; a double click takes the range away again.
      zoom(change) {
        if (!change) return;
        const ends = ["xaxis.range[0]", "xaxis.range[1]"].map((key) => Number(change[key]));
        if (ends.every(Number.isFinite)) {
          const [from, to] = [Math.max(0, Math.ceil(Math.min(...ends))), Math.max(0, Math.floor(Math.max(...ends)))];
          if (to >= from) set({ from, to });
        } else if (change["xaxis.autorange"]) set({ from: null, to: null });
      },
      compare(rows) {
        if (!rows || rows.length < 2) return "choose two or more to compare them";
        const names = rows.map((row) => row.name);
        const search = changed("", { run: names[0], with: names.slice(1).join("/") });
        const link = { href: "/compare" + search, children: "compare " + names.join(" with ") };
        return { namespace: "dash_core_components", type: "Link", props: link };
      },
      open_run(values, ids) {
        if (ids.length && values[0] && values[0] !== ids[0]["run-of"]) go(window.location.pathname, changed("", { run: values[0] }));
      },
    },
  });

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
  grid.Severity = function (props) {
    const icon = window.React.createElement("span", { className: "icon", "aria-hidden": true }, props.data.icon);
    return window.React.createElement("span", { className: "badge badge-" + props.value }, icon,
      window.React.createElement("span", null, props.data.word));
  };

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const link = event.key === "Enter" && event.target.matches(".ag-cell") && event.target.querySelector("a");
    if (link) link.click();  // the grid moves its focus from cell to cell
    const search = document.getElementById("module-search") || document.getElementById("runs-search");
    if (event.key === "/" && search) { event.preventDefault(); search.focus(); search.click(); }
    const offset = { "[": -1, "]": 1 }[event.key];
    if (offset) step(offset);
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

  // Files: a table as CSV, a plot as PNG on the page's own background.
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
  const tableCsv = (table) => Array.from(table.rows, (row) =>
    Array.from(row.cells, (one) => cell(one.textContent.trim())).join(",")).join("\n") + "\n";
  const savePng = (id) => {
    const plot = document.querySelector(`[id="${id}"] .js-plotly-plot`);
    const style = getComputedStyle(document.body);
    const layout = { ...plot.layout, paper_bgcolor: style.backgroundColor, font: { ...plot.layout.font, color: style.color } };
    window.Plotly.downloadImage({ data: plot.data, layout },
      { format: "png", scale: 2, filename: id, width: plot.clientWidth, height: plot.clientHeight });
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button.save");
    if (!button) return;
    const { png, csv, csvGrid } = button.dataset;
    if (png) savePng(png);
    else if (csv) save(tableCsv(button.parentElement.querySelector("table")), csv);
    else if (csvGrid) window.dash_ag_grid.getApi(csvGrid).exportDataAsCsv({
      fileName: csvGrid + ".csv", processCellCallback: (one) => String(one.value ?? "").replace(/^(?=[=+@\t\r]|-\D)/, "'") });
  });
})();
