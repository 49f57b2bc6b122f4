"""An emulated world for hosts on one machine: slower processors, narrower links, radios."""
