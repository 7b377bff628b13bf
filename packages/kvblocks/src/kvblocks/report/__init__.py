"""Reports as one HTML file: text, tables and charts, with no network and no dependency.

`page` is the shell (colours, light and dark, print, what a pointer or a key shows), `charts` draws,
`simulation` shows what `kvblocks simulate` found, `replay` what `kvblocks replay` went through.

Knows nothing itself; it only names the parts.
"""
