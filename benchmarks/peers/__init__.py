"""Other engines, for the same benchmark run: what each needs (`NAME.txt`), and the script that drives them."""
