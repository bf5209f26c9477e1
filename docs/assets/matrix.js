// Filters of the support matrix: rows by layer, columns by extension, and rows that have a generic or refused cell.
const matches = (text, wanted) =>
  wanted.toLowerCase().split(/[\s,]+/).filter(Boolean).some((word) => text.toLowerCase().includes(word)) || !wanted.trim();

function filterTable(table, layer, extension, kind) {
  const heads = [...table.tHead.rows[0].cells];
  const shown = heads.map((head, k) => k === 0 || matches(head.textContent, extension));
  heads.forEach((head, k) => { head.hidden = !shown[k]; });
  return [...table.tBodies].reduce((sum, body) => sum + filterGroup(body, shown, layer, kind), 0);
}

// the rows of one group; its heading goes with the last of them
function filterGroup(body, shown, layer, kind) {
  let rows = 0;
  for (const row of body.rows) {
    if (row.dataset.layer === undefined) continue;
    const cells = [...row.cells];
    cells.forEach((cell, k) => { cell.hidden = !shown[k]; });
    const has = !kind || cells.some((cell, k) => shown[k] && cell.classList.contains(kind));
    row.hidden = !(has && matches(row.dataset.layer, layer));
    rows += row.hidden ? 0 : 1;
  }
  body.hidden = rows === 0;
  return rows;
}

function startFilters() {
  const fields = ["layer", "extension", "kind"].map((name) => document.getElementById(`filter-${name}`));
  if (fields.includes(null)) return;
  const update = () => {
    const wanted = fields.map((field) => field.value);
    const counts = [...document.querySelectorAll(".matrix table")].map((table) => filterTable(table, ...wanted));
    document.getElementById("filter-count").textContent = `${counts.reduce((a, b) => a + b, 0)} rows`;
  };
  fields.forEach((field) => field.addEventListener("input", update));
  update();
}

startFilters();
