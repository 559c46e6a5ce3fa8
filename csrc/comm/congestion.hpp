// Congestion control of connections that stay on one host: the plainest there is.
//
// No other host's packets queue on the loopback, so there is nothing to control, and what a system's default does for
// real networks costs: BBR (Cardwell et al., ACM Queue 2016) paces each segment with a timer. To be asked for before a
// connection is up, since BBR leaves its pacing behind when it is replaced later.
#pragma once

#include <string>

namespace elastic::comm {

// Returns the algorithm of a TCP socket; empty if the system does not report it.
std::string congestion_control(int socket);

// Returns true if the system granted it.
bool set_congestion_control(int socket, const std::string& name);

// "reno": every system has it and grants it without privileges.
bool use_plain_congestion_control(int socket);

// Both ends of this connected TCP socket are of one host.
bool stays_on_host(int socket);

}  // namespace elastic::comm
