// Paths that carry nothing: a cable that is out, a switch that drops all packets. TCP itself waits a quarter of an
// hour.
//
// TCP_USER_TIMEOUT would also end a connection whose peer does not read, since it counts the time of a closed window
// (tcp(7)). A rank that is stopped, or computes for long, must not lose its links. Its kernel acknowledges what comes,
// so only the age of the last acknowledgement tells a dead path from a slow peer. The kernel asks an idle peer for one
// (keepalive), and ends the connection without an answer; where data are under way, it does not, and we look ourselves.
#pragma once

namespace elastic::comm {

// Ends this connection when nothing is under way and its peer's host has acknowledged nothing for about `seconds`.
void ask_when_idle(int socket, double seconds);

// As long as neither side sends much: ends it also when something is under way. Zero: from now on no more.
void limit_unacknowledged(int socket, double seconds);

// Data are under way on this connection, and its peer's host has acknowledged nothing for `seconds`.
bool is_silent(int socket, double seconds);

}  // namespace elastic::comm
