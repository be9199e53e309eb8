// What runs in the browser: controls write the URL, "/" finds a module, and cells of grids show text, never HTML.
(function () {
  const go = (pathname, search) => window.dash_clientside.set_props("url", { pathname, search });

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

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    fp8debug: {
      sync(values, ids, search) {
        const wanted = {};
        ids.forEach((id, i) => { wanted[id.control] = values[i] === id.default ? null : values[i]; });
        const next = changed(search, wanted);
        const same = new URLSearchParams(next).toString() === new URLSearchParams(search || "").toString();
        return same ? window.dash_clientside.no_update : next;
      },
      pause(follow) { return !follow; },
      open_module(name, search) {
        const none = window.dash_clientside.no_update;
        const params = new URLSearchParams(search || "");
        if (!name || (params.get("module") === name && window.location.pathname === "/module")) return [none, none];
        return ["/module", changed(search, { module: name })];
      },
      open_run(name, search) {
        const params = new URLSearchParams(search || "");
        if (!name || params.get("run") === name) return window.dash_clientside.no_update;
        return changed("", { run: name });
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
      go(pathname, search || "");
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
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const search = document.getElementById("module-search");
    if (search) { event.preventDefault(); search.focus(); search.click(); }
  });
})();
