"""The style sheet of the report page: light and dark by the reader's own setting, and fit for print."""

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #5b6470; --page: #f6f7f9; --panel: #ffffff; --line: #d8dde3;
  --accent: #1f5fbf; --error: #b3261e; --warning: #8a5a00; --info: #1f5fbf; --ok: #1a7f37; --shade: #b3261e1f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --muted: #a0a9b5; --page: #14171b; --panel: #1d2127;
  --line: #363d47; --accent: #7fb0ff; --error: #ff8a80; --warning: #f2b84b; --info: #7fb0ff;
  --ok: #6fd08c; --shade: #ff8a8026; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 0 0 8px; }
h3 { font-size: 16px; margin: 0 0 6px; overflow-wrap: anywhere; } h4 { margin: 12px 0 2px; font-size: 14px; }
section { margin-top: 20px; } p { margin: 6px 0; } ul, ol { margin: 6px 0; padding-left: 22px; } li { overflow-wrap: anywhere; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 16px; }
article.panel { margin-top: 14px; border-left-width: 4px; }
article.error { border-left-color: var(--error); } article.warning { border-left-color: var(--warning); }
article.info { border-left-color: var(--info); }
.muted { color: var(--muted); font-size: 13px; } .lead { font-size: 16px; overflow-wrap: anywhere; }
.badge { border: 1px solid currentColor; border-radius: 6px; padding: 1px 8px; font-size: 14px; font-weight: 600;
  white-space: nowrap; }
.badge.error { color: var(--error); } .badge.warning { color: var(--warning); } .badge.info { color: var(--info); }
.badge.ok { color: var(--ok); }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 8px 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--accent); }
.classes .here { border-left: 3px solid var(--accent); padding-left: 6px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 12px; margin: 12px 0; }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; }
svg .name { fill: var(--ink); font-size: 12px; font-weight: 600; } svg .tick { fill: var(--muted); }
svg .strong { fill: var(--error); font-weight: 600; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--line); } svg .limit { stroke: var(--warning); stroke-dasharray: 5 4; }
svg .mark { stroke: var(--error); stroke-dasharray: 2 3; } svg .span { fill: var(--shade); }
svg .lost { fill: #8e24aa; fill-opacity: 0.18; }
svg .line { fill: none; stroke: var(--accent); stroke-width: 1.5; } svg .dot { fill: var(--accent); }
footer { margin-top: 20px; }
@media print { body { background: none; } .panel { break-inside: avoid; } }
"""
