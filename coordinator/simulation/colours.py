"""The colours of all pictures: those of Okabe and Ito, which people with any kind of colour vision tell apart."""

from coordinator.simulation.timeline import Activity

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
# For lines, in this order; each also has a marker of its own.
SERIES = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

COMPUTE, COMMUNICATE, WAIT = BLUE, SKY, ORANGE
OF_ACTIVITY = {Activity.COMPUTE: COMPUTE, Activity.WAIT: WAIT, Activity.DEAD: BLACK}
