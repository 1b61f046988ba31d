"""Ray: the nodes of a placement group, a launcher on each, and the driver that starts and watches them."""
