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

// a table without rows goes with its heading
function filterBox(box, wanted) {
  const rows = filterTable(box.querySelector("table"), ...wanted);
  box.hidden = rows === 0;
  if (box.previousElementSibling) box.previousElementSibling.hidden = box.hidden;
  return rows;
}

// the filter as the part of an address after its question mark, to come back to or to pass on
function queryOf(names, wanted) {
  const query = new URLSearchParams();
  names.forEach((name, k) => { if (wanted[k].trim()) query.set(name, wanted[k].trim()); });
  return query.toString();
}

function startFilters() {
  const names = ["layer", "extension", "kind"];
  const fields = names.map((name) => document.getElementById(`filter-${name}`));
  if (fields.includes(null)) return;
  const update = () => {
    const wanted = fields.map((field) => field.value);
    const rows = [...document.querySelectorAll(".matrix")].reduce((sum, box) => sum + filterBox(box, wanted), 0);
    document.getElementById("filter-count").textContent = rows ? `${rows} rows` : "no rows";
    const query = queryOf(names, wanted);
    history.replaceState(null, "", location.pathname + (query && `?${query}`) + location.hash);
  };
  const asked = new URLSearchParams(location.search);
  fields.forEach((field, k) => {
    field.value = asked.get(names[k]) || "";
    if (!field.value) field.value = ""; // a choice that the list does not have
    field.addEventListener("input", update);
  });
  update();
}

startFilters();
