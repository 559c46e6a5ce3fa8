#include "transfers.hpp"

#include <algorithm>

namespace elastic::comm {

Transfers::Transfers(const Call& call, uint64_t tag) : call_(call), tag_(tag) {}

void Transfers::receive(int from, void* into, size_t size, const Keep& keep) {
  open_.push_back(receives_.size());
  receives_.push_back(receive_from(call_, from, tag_, into, size, keep, true));
}

void Transfers::send(int to, const void* data, size_t size, const Keep& keep) {
  sends_.push_back(send_to(call_, to, tag_, data, size, keep));
}

std::vector<int> Transfers::ended() {
  std::vector<int> numbers;
  for (auto it = open_.begin(); it != open_.end();) {
    if (!receives_[*it]->ended()) {
      ++it;
      continue;
    }
    receives_[*it]->wait(0);
    numbers.push_back(int(*it));
    it = open_.erase(it);
  }
  return numbers;
}

bool Transfers::anything_to_tell() const {
  if (open_.empty()) return std::all_of(sends_.begin(), sends_.end(), [](auto& send) { return send->ended(); });
  return std::any_of(open_.begin(), open_.end(), [this](size_t number) { return receives_[number]->ended(); });
}

std::vector<int> Transfers::come() {
  const auto shared = call_.hub.enter(call_.generation);
  call_.hub.pump();
  return ended();
}

std::vector<int> Transfers::wait() {
  try {
    if (!anything_to_tell()) {
      const auto shared = call_.hub.enter(call_.generation);
      WaitScope scope;
      scope.generation = call_.generation;
      scope.seconds = call_.timeout;
      scope.deadline =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(call_.timeout));
      scope.missing = [this](std::vector<int>* ranks) {
        for (size_t number : open_) receives_[number]->missing(ranks);
        for (auto& send : sends_) send->missing(ranks);
      };
      call_.hub.wait(scope, [this] { return anything_to_tell(); });
    }
    if (open_.empty()) {
      for (auto& send : sends_) send->wait(0);
    }
    return ended();
  } catch (...) {
    withdraw(std::current_exception());
    throw;
  }
}

void Transfers::withdraw(const std::exception_ptr& error) {
  for (size_t number : open_) receives_[number]->withdraw(error);
  for (auto& send : sends_) send->withdraw(error);
}

}  // namespace elastic::comm
