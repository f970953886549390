#include "tests/faulty_env.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace kstep {
namespace {

constexpr std::uint64_t kSectorBytes = 512;

}  // namespace

struct FaultyEnv::Node {
  bool is_dir = false;
  std::map<std::string, NodePtr> seen_names;
  std::map<std::string, NodePtr> durable_names;
  std::vector<std::byte> seen;
  std::vector<std::byte> durable;
  std::uint32_t num_handles = 0;
  bool is_removed = false;  // no name is seen any more
};

class FaultyEnv::MemoryFile : public File {
 public:
  MemoryFile(FaultyEnv* env, std::string path, NodePtr node, bool is_direct)
      : env_(env), path_(std::move(path)), node_(std::move(node)), is_direct_(is_direct) {
    ++node_->num_handles;
  }
  ~MemoryFile() override { env_->close(node_); }
  Status read_at(std::uint64_t offset, void* buffer, std::size_t n, std::size_t* got) override {
    return env_->read(node_.get(), path_, offset, buffer, n, got);
  }
  Status write_at(std::uint64_t offset, const void* buffer, std::size_t n) override {
    return env_->write(node_.get(), path_, offset, buffer, n);
  }
  Status sync() override { return env_->sync(node_.get(), path_); }
  Status size_bytes(std::uint64_t* out) override {
    *out = node_->seen.size();
    return {};
  }
  int descriptor() const override { return -1; }
  bool is_direct() const override { return is_direct_; }
  const std::string& path() const override { return path_; }

 private:
  FaultyEnv* env_;
  std::string path_;
  NodePtr node_;
  bool is_direct_;
};

class FaultyEnv::MemoryLock : public FileLock {
 public:
  MemoryLock(FaultyEnv* env, std::string path) : env_(env), path_(std::move(path)) {}
  ~MemoryLock() override {
    std::lock_guard<std::mutex> guard(env_->mutex_);
    env_->locked_.erase(path_);
  }

 private:
  FaultyEnv* env_;
  std::string path_;
};

FaultyEnv::FaultyEnv() : root_(std::make_shared<Node>()) { root_->is_dir = true; }
FaultyEnv::~FaultyEnv() = default;

void FaultyEnv::fail(Op op, std::uint64_t nth, StatusKind kind, std::uint64_t repeat) {
  std::lock_guard<std::mutex> guard(mutex_);
  faults_[op] = {num_ops_[op] + nth, num_ops_[op] + nth + repeat, kind};
}

void FaultyEnv::clear_faults() {
  std::lock_guard<std::mutex> guard(mutex_);
  faults_.clear();
  capacity_bytes_ = 0;
  read_delay_us_ = 0;
  short_read_at_ = flip_at_ = UINT64_MAX;
  num_reads_let_ = UINT64_MAX;
  reads_let_.notify_all();
  closes_are_held_ = false;
  closes_let_.notify_all();
}

void FaultyEnv::set_capacity_bytes(std::uint64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  capacity_bytes_ = bytes;
}

void FaultyEnv::freeze_after_syncs(std::uint64_t nth) {
  std::lock_guard<std::mutex> guard(mutex_);
  freeze_at_ = num_syncs_ + nth;
}

void FaultyEnv::shorten_read(std::uint64_t nth) {
  std::lock_guard<std::mutex> guard(mutex_);
  short_read_at_ = num_ops_[Op::Read] + nth;
}

void FaultyEnv::flip_bit_in_read(std::uint64_t nth) {
  std::lock_guard<std::mutex> guard(mutex_);
  flip_at_ = num_ops_[Op::Read] + nth;
}

void FaultyEnv::set_read_delay_us(std::uint32_t microseconds) {
  std::lock_guard<std::mutex> guard(mutex_);
  read_delay_us_ = microseconds;
}

void FaultyEnv::hold_reads(std::uint64_t max_bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  num_reads_let_ = 0;
  max_held_bytes_ = max_bytes;
}

std::uint64_t FaultyEnv::num_held_reads() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return num_held_reads_;
}

void FaultyEnv::let_read() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (num_reads_let_ != UINT64_MAX) ++num_reads_let_;
  reads_let_.notify_all();
}

void FaultyEnv::hold_closes() {
  std::lock_guard<std::mutex> guard(mutex_);
  closes_are_held_ = true;
}

std::uint64_t FaultyEnv::num_held_closes() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return num_held_closes_;
}

void FaultyEnv::let_closes() {
  std::lock_guard<std::mutex> guard(mutex_);
  closes_are_held_ = false;
  closes_let_.notify_all();
}

void FaultyEnv::crash(double keep_share, std::uint64_t seed) {
  std::lock_guard<std::mutex> guard(mutex_);
  std::mt19937_64 rng(seed);
  if (frozen_root_ != nullptr) root_ = std::move(frozen_root_);
  frozen_root_ = nullptr;
  crash_node(root_, keep_share, &rng);
  freeze_at_ = UINT64_MAX;
  locked_.clear();
}

void FaultyEnv::crash_node(const NodePtr& node, double keep_share, std::mt19937_64* rng) {
  std::uniform_real_distribution<double> uniform;
  if (node->is_dir) {
    const bool is_kept = uniform(*rng) < keep_share;
    if (is_kept) node->durable_names = node->seen_names;
    node->seen_names = node->durable_names;
    for (const auto& item : node->seen_names) crash_node(item.second, keep_share, rng);
    return;
  }
  std::vector<std::byte>& seen = node->seen;
  std::vector<std::byte>& durable = node->durable;
  const std::size_t before = durable.size();
  for (std::size_t at = 0; at < seen.size(); at += kSectorBytes) {
    const std::size_t end = std::min<std::size_t>(at + kSectorBytes, seen.size());
    const bool is_same = end <= before && std::equal(seen.begin() + static_cast<std::ptrdiff_t>(at), seen.begin() + static_cast<std::ptrdiff_t>(end),
                                                     durable.begin() + static_cast<std::ptrdiff_t>(at));
    if (is_same || uniform(*rng) >= keep_share) continue;
    if (durable.size() < end) durable.resize(end);  // a hole before it reads as zeros
    std::copy(seen.begin() + static_cast<std::ptrdiff_t>(at), seen.begin() + static_cast<std::ptrdiff_t>(end),
              durable.begin() + static_cast<std::ptrdiff_t>(at));
  }
  seen = durable;
}

void FaultyEnv::damage(const std::string& path, std::uint64_t offset) {
  std::lock_guard<std::mutex> guard(mutex_);
  NodePtr node = find(path);
  node->seen.at(offset) ^= std::byte{1};
  node->durable = node->seen;
}

std::uint64_t FaultyEnv::num_ops(Op op) const {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto it = num_ops_.find(op);
  return it == num_ops_.end() ? 0 : it->second;
}

std::uint64_t FaultyEnv::stored_bytes() {
  std::lock_guard<std::mutex> guard(mutex_);
  return stored_bytes_;
}

std::vector<std::string> FaultyEnv::files_under(const std::string& path) {
  std::vector<std::string> names;
  std::vector<std::string> files;
  Status status = list(path, &names);
  if (!status.ok()) return {path};
  for (const std::string& name : names) {
    for (const std::string& file : files_under(path + "/" + name)) files.push_back(file);
  }
  return files;
}

FaultyEnv::NodePtr FaultyEnv::find(const std::string& path) const {
  NodePtr node = root_;
  std::size_t at = 0;
  while (at < path.size()) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const std::string name = path.substr(at, end - at);
    at = end + 1;
    if (name.empty()) continue;
    const auto it = node->seen_names.find(name);
    if (it == node->seen_names.end()) return nullptr;
    node = it->second;
  }
  return node;
}

Status FaultyEnv::find_parent(const std::string& path, NodePtr* parent, std::string* name) const {
  const std::size_t slash = path.rfind('/');
  *name = path.substr(slash + 1);
  *parent = find(path.substr(0, slash));
  if (*parent == nullptr || !(*parent)->is_dir) return Status::not_found(path, "no parent folder");
  return {};
}

Status FaultyEnv::count(Op op, const std::string& context) {
  const std::uint64_t index = num_ops_[op]++;
  const auto it = faults_.find(op);
  if (it == faults_.end() || index < it->second.at || index > it->second.until) return {};
  return {it->second.kind, context, "injected fault"};
}

Status FaultyEnv::read(Node* node, const std::string& path, std::uint64_t offset, void* buffer, std::size_t n, std::size_t* got) {
  std::unique_lock<std::mutex> guard(mutex_);
  *got = 0;
  const std::uint64_t index = num_ops_[Op::Read];
  KSTEP_RETURN_IF_ERROR(count(Op::Read, "read " + path));
  if (n <= max_held_bytes_) {
    ++num_held_reads_;
    reads_let_.wait(guard, [this] { return num_reads_let_ > 0; });
    --num_held_reads_;
    if (num_reads_let_ != UINT64_MAX) --num_reads_let_;
  }
  const std::uint32_t delay_us = read_delay_us_;
  if (offset < node->seen.size()) *got = std::min<std::size_t>(n, node->seen.size() - offset);
  if (index == short_read_at_) *got /= 2;
  std::memcpy(buffer, node->seen.data() + offset, *got);
  if (index == flip_at_ && *got > 0) static_cast<std::byte*>(buffer)[*got / 2] ^= std::byte{4};
  guard.unlock();
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return {};
}

Status FaultyEnv::write(Node* node, const std::string& path, std::uint64_t offset, const void* buffer, std::size_t n) {
  std::lock_guard<std::mutex> guard(mutex_);
  KSTEP_RETURN_IF_ERROR(count(Op::Write, "write " + path));
  const std::size_t end = offset + n;
  const std::uint64_t growth = end > node->seen.size() ? end - node->seen.size() : 0;
  if (capacity_bytes_ != 0 && stored_bytes_ + growth > capacity_bytes_) return Status::no_space("write " + path, "injected full drive");
  if (growth > 0) node->seen.resize(end);
  stored_bytes_ += growth;
  std::memcpy(node->seen.data() + offset, buffer, n);
  return {};
}

bool FaultyEnv::take_sync() {
  if (num_syncs_ == freeze_at_) {
    std::map<Node*, NodePtr> copies;
    frozen_root_ = copy_tree(root_, &copies);
  }
  return num_syncs_++ < freeze_at_;
}

// Hard links stay links: a node that is met again is the same copy.
FaultyEnv::NodePtr FaultyEnv::copy_tree(const NodePtr& node, std::map<Node*, NodePtr>* copies) const {
  NodePtr& copy = (*copies)[node.get()];
  if (copy != nullptr) return copy;
  copy = std::make_shared<Node>();
  const NodePtr result = copy;  // the map may move its entries while names are copied
  result->is_dir = node->is_dir;
  result->seen = node->seen;
  result->durable = node->durable;
  for (const auto& item : node->seen_names) result->seen_names[item.first] = copy_tree(item.second, copies);
  for (const auto& item : node->durable_names) result->durable_names[item.first] = copy_tree(item.second, copies);
  return result;
}

Status FaultyEnv::sync(Node* node, const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex_);
  KSTEP_RETURN_IF_ERROR(count(Op::Sync, "sync " + path));
  if (take_sync()) node->durable = node->seen;
  return {};
}

Status FaultyEnv::open(const std::string& path, OpenMode mode, bool direct, std::unique_ptr<File>* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  KSTEP_RETURN_IF_ERROR(count(Op::Open, "open " + path));
  NodePtr parent;
  std::string name;
  KSTEP_RETURN_IF_ERROR(find_parent(path, &parent, &name));
  const auto it = parent->seen_names.find(name);
  NodePtr node = it == parent->seen_names.end() ? nullptr : it->second;
  if (mode == OpenMode::Create) {
    if (node != nullptr) return Status::io("open " + path, "exists already");
    node = std::make_shared<Node>();
    parent->seen_names[name] = node;
  }
  if (node == nullptr || node->is_dir) return Status::not_found("open " + path, "no such file");
  *out = std::make_unique<MemoryFile>(this, path, node, direct);
  return {};
}

Status FaultyEnv::make_dir(const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex_);
  NodePtr parent;
  std::string name;
  KSTEP_RETURN_IF_ERROR(find_parent(path, &parent, &name));
  if (parent->seen_names.count(name) > 0) return {};
  auto node = std::make_shared<Node>();
  node->is_dir = true;
  parent->seen_names[name] = node;
  return {};
}

Status FaultyEnv::remove_file(const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex_);
  NodePtr parent;
  std::string name;
  KSTEP_RETURN_IF_ERROR(find_parent(path, &parent, &name));
  const auto it = parent->seen_names.find(name);
  if (it == parent->seen_names.end()) return Status::not_found("remove " + path, "no such file");
  const NodePtr node = it->second;
  parent->seen_names.erase(it);
  node->is_removed = !has_name(root_, node.get());
  if (node->is_removed && node->num_handles == 0) stored_bytes_ -= std::min<std::uint64_t>(stored_bytes_, node->seen.size());
  return {};
}

bool FaultyEnv::has_name(const NodePtr& folder, const Node* node) {
  for (const auto& item : folder->seen_names) {
    if (item.second.get() == node || has_name(item.second, node)) return true;
  }
  return false;
}

void FaultyEnv::close(const NodePtr& node) {
  std::unique_lock<std::mutex> guard(mutex_);
  if (--node->num_handles > 0 || !node->is_removed) return;
  ++num_held_closes_;
  closes_let_.wait(guard, [this] { return !closes_are_held_; });
  --num_held_closes_;
  stored_bytes_ -= std::min<std::uint64_t>(stored_bytes_, node->seen.size());
}

Status FaultyEnv::remove_dir(const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex_);
  NodePtr parent;
  std::string name;
  KSTEP_RETURN_IF_ERROR(find_parent(path, &parent, &name));
  NodePtr node = find(path);
  if (node == nullptr || !node->is_dir || !node->seen_names.empty()) return Status::io("remove folder " + path, "absent or not empty");
  parent->seen_names.erase(name);
  return {};
}

Status FaultyEnv::rename(const std::string& from, const std::string& to) {
  std::lock_guard<std::mutex> guard(mutex_);
  KSTEP_RETURN_IF_ERROR(count(Op::Rename, "rename " + from));
  NodePtr from_parent;
  NodePtr to_parent;
  std::string from_name;
  std::string to_name;
  KSTEP_RETURN_IF_ERROR(find_parent(from, &from_parent, &from_name));
  KSTEP_RETURN_IF_ERROR(find_parent(to, &to_parent, &to_name));
  const auto it = from_parent->seen_names.find(from_name);
  if (it == from_parent->seen_names.end()) return Status::not_found("rename " + from, "no such name");
  NodePtr node = it->second;
  from_parent->seen_names.erase(it);
  to_parent->seen_names[to_name] = node;
  return {};
}

Status FaultyEnv::link(const std::string& from, const std::string& to) {
  std::lock_guard<std::mutex> guard(mutex_);
  KSTEP_RETURN_IF_ERROR(count(Op::Link, "link " + from));
  NodePtr node = find(from);
  NodePtr parent;
  std::string name;
  KSTEP_RETURN_IF_ERROR(find_parent(to, &parent, &name));
  if (node == nullptr || node->is_dir) return Status::not_found("link " + from, "no such file");
  if (parent->seen_names.count(name) > 0) return Status::io("link " + to, "exists already");
  parent->seen_names[name] = node;
  return {};
}

Status FaultyEnv::list(const std::string& path, std::vector<std::string>* names) {
  std::lock_guard<std::mutex> guard(mutex_);
  names->clear();
  NodePtr node = find(path);
  if (node == nullptr || !node->is_dir) return Status::not_found("list " + path, "no such folder");
  for (const auto& item : node->seen_names) names->push_back(item.first);
  return {};
}

Status FaultyEnv::sync_dir(const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex_);
  KSTEP_RETURN_IF_ERROR(count(Op::SyncDir, "sync folder " + path));
  NodePtr node = find(path);
  if (node == nullptr) return Status::not_found("sync folder " + path, "no such folder");
  if (take_sync()) node->durable_names = node->seen_names;
  return {};
}

bool FaultyEnv::exists(const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex_);
  return find(path) != nullptr;
}

Status FaultyEnv::file_size(const std::string& path, std::uint64_t* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  NodePtr node = find(path);
  if (node == nullptr) return Status::not_found("stat " + path, "no such file");
  *out = node->seen.size();
  return {};
}

Status FaultyEnv::free_bytes(const std::string&, std::uint64_t* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  *out = capacity_bytes_ == 0 ? UINT64_MAX : capacity_bytes_ - std::min(capacity_bytes_, stored_bytes_);
  return {};
}

Status FaultyEnv::direct_alignment(const std::string&, std::uint32_t* out) {
  *out = kSectorBytes;
  return {};
}

Status FaultyEnv::lock(const std::string& path, std::unique_ptr<FileLock>* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!locked_.insert(path).second) return Status::busy("lock " + path, "held already");
  *out = std::make_unique<MemoryLock>(this, path);
  return {};
}

Status FaultyEnv::new_engine(IoBackend backend, std::uint32_t depth, std::unique_ptr<IoEngine>* out) {
  *out = backend == IoBackend::Threads ? make_thread_engine(depth, std::min<std::uint32_t>(depth, 4)) : make_inline_engine(depth);
  return {};
}

}  // namespace kstep
