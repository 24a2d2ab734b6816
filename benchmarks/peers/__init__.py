"""Other engines ("peers"): the packages of each (`NAME.txt`), and the script that drives them."""
