"""Studies: a coordinator and its partners, each with its own file on its own machine. Commands: `coterie study`,
`coterie site`, `coterie doctor`."""
