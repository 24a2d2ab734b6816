"""The command line: `holdfast serve | store | chat | demo | doctor | bench`."""
