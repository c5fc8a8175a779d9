"""What training depends on in this machine, one finding for each thing: `trunkline doctor` prints them."""
