"""The command line: `holdfast serve | store | chat | demo | fetch | doctor | bench`."""
