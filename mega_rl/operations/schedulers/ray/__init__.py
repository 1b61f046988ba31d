"""Ray: nodes of a placement group, a launcher on each, and the driver that watches them."""
