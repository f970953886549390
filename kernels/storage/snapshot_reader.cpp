#include "storage/snapshot_reader.h"

#include <algorithm>

namespace kstep {
namespace {

constexpr std::uint32_t kMaxOpenFiles = 32;
constexpr std::uint32_t kQueueDepth = 64;
constexpr std::uint64_t kScanBytes = 1u << 20;

}  // namespace

SnapshotReader::SnapshotReader(Env* env, const std::vector<std::string>& paths) : catalog_(env, paths), context_(env, kMaxOpenFiles) {}

Status SnapshotReader::open(Env* env, const std::vector<std::string>& paths, const std::string& name, std::unique_ptr<SnapshotReader>* out) {
  if (env == nullptr) env = &Env::posix();
  std::unique_ptr<SnapshotReader> reader(new SnapshotReader(env, paths));
  KSTEP_RETURN_IF_ERROR(reader->catalog_.read(name, &reader->manifest_));
  const Manifest& manifest = reader->manifest_;
  if (manifest.num_paths != paths.size()) {
    return Status::invalid("snapshot '" + name + "'", "lies on " + std::to_string(manifest.num_paths) + " paths, got " + std::to_string(paths.size()));
  }
  StoreContext& context = reader->context_;
  context.store_id = manifest.store_id;
  context.use_direct_io = false;  // evaluation re-reads rows; the page cache serves it
  context.path_bytes.assign(paths.size(), 0);
  context.path_bytes_read.assign(paths.size(), 0);
  context.alignments.assign(paths.size(), 1);
  for (std::uint32_t path = 0; path < paths.size(); ++path) context.roots.push_back(reader->catalog_.folder(path, name));
  KSTEP_RETURN_IF_ERROR(env->new_engine(IoBackend::Auto, kQueueDepth, &context.reads));

  for (const ManifestLog& entry : manifest.logs) {
    RecordLayout layout = RecordLayout::for_payload(entry.payload_bytes, 0);
    for (const ManifestSegment& segment : entry.segments) layout.max_units = std::max(layout.max_units, layout.units_for(segment.num_records));
    reader->logs_.push_back(std::make_unique<RowLog>(&context, layout, 0));
  }
  for (const TableSpec& spec : manifest.tables) {
    auto table = std::make_unique<TableState>(spec);
    for (const auto& log : reader->logs_) {
      if (log->layout().payload_bytes == spec.schema.payload_bytes()) table->log = log.get();
    }
    if (table->log == nullptr) return Status::corruption("snapshot '" + name + "'", "table '" + spec.name + "' has no log");
    context.table_of_record_id[spec.record_table_id()] = table.get();
    context.tables.push_back(std::move(table));
  }
  for (std::size_t i = 0; i < manifest.logs.size(); ++i) {
    LoadedEpochs epochs;
    for (const ManifestSegment& segment : manifest.logs[i].segments) {
      KSTEP_RETURN_IF_ERROR(reader->logs_[i]->load_segment(segment.id, segment.path, segment.file_bytes, segment.trailer_crc, &epochs));
    }
  }
  *out = std::move(reader);
  return {};
}

TableState* SnapshotReader::find_table(const std::string& name) {
  for (const auto& table : context_.tables) {
    if (table->spec.name == name) return table.get();
  }
  return nullptr;
}

Status SnapshotReader::read(ReadRow* rows, std::size_t num_rows) { return num_rows == 0 ? Status() : rows[0].table->log->read(rows, num_rows); }

template <typename Visit>
Status SnapshotReader::scan_segment(RowLog* log, std::uint32_t ordinal, Visit visit) {
  const RecordLayout& layout = log->layout();
  const Segment& segment = log->segments()[ordinal];
  const std::uint32_t num_units = layout.units_for(segment.num_records);
  const auto piece_units = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, kScanBytes / layout.unit_bytes));
  AlignedBuffer piece(std::size_t{piece_units} * layout.unit_bytes);
  for (std::uint32_t unit = 0; unit < num_units; unit += piece_units) {
    const std::uint32_t first = unit * layout.records_per_unit;
    const std::uint32_t end = std::min(segment.num_records, (unit + piece_units) * layout.records_per_unit);
    const std::size_t num_bytes = std::size_t{std::min(piece_units, num_units - unit)} * layout.unit_bytes;
    File* file = nullptr;
    std::size_t got = 0;
    KSTEP_RETURN_IF_ERROR(log->acquire(segment, &file));
    Status status = file->read_at(layout.offset_of(first), piece.data(), num_bytes, &got);
    log->release(segment);
    KSTEP_RETURN_IF_ERROR(status);
    if (got != num_bytes) {
      return Status::corruption(log->segment_path(segment) + " at offset " + std::to_string(layout.offset_of(first)),
                                "expected " + std::to_string(num_bytes) + " bytes, got " + std::to_string(got));
    }
    for (std::uint32_t record = first; record < end; ++record) {
      const std::byte* bytes = piece.data() + (layout.offset_of(record) - layout.offset_of(first));
      RecordTail tail;
      const bool is_intact = read_record_tail(layout, bytes, &tail);
      KSTEP_RETURN_IF_ERROR(visit(record, tail, bytes, is_intact));
    }
  }
  return {};
}

Status SnapshotReader::for_each_row(TableState* table, const std::function<Status(std::uint64_t, const std::byte*)>& visit) {
  RowLog* log = table->log;
  std::uint64_t num_visited = 0;
  for (std::uint32_t ordinal = 0; ordinal < log->segments().size(); ++ordinal) {
    KSTEP_RETURN_IF_ERROR(scan_segment(log, ordinal, [&](std::uint32_t record, const RecordTail& tail, const std::byte* bytes, bool is_intact) {
      if (!is_intact) {
        return Status::corruption(log->segment_path(log->segments()[ordinal]) + " at offset " + std::to_string(log->layout().offset_of(record)),
                                  "record checksum does not match");
      }
      const bool is_newest = tail.table_id == table->spec.record_table_id() && table->index.find(tail.row_id) == log->first_slot(ordinal) + record;
      if (!is_newest) return Status();
      ++num_visited;
      return visit(tail.row_id, bytes);
    }));
  }
  if (num_visited == table->index.num_materialised()) return {};
  return Status::corruption("table '" + table->spec.name + "'", "the footers name " + std::to_string(table->index.num_materialised()) +
                                                                    " rows, the records hold " + std::to_string(num_visited));
}

Status SnapshotReader::verify(VerifyReport* report) {
  *report = VerifyReport();
  for (const auto& log : logs_) {
    for (std::uint32_t ordinal = 0; ordinal < log->segments().size(); ++ordinal) {
      const Segment& segment = log->segments()[ordinal];
      ++report->num_segments;
      report->file_bytes += segment.file_bytes;
      std::uint32_t num_live = 0;
      Status status = scan_segment(log.get(), ordinal, [&](std::uint32_t record, const RecordTail& tail, const std::byte*, bool is_intact) {
        ++report->num_records;
        const std::string place = log->segment_path(segment) + " at offset " + std::to_string(log->layout().offset_of(record));
        if (!is_intact) {
          report->failures.push_back(place + ": record checksum does not match");
          return Status();
        }
        TableState* table = context_.find_table(tail.table_id);
        if (table == nullptr || tail.row_id >= table->spec.num_rows) {
          report->failures.push_back(place + ": record of an unknown table or row");
        } else if (table->index.find(tail.row_id) == log->first_slot(ordinal) + record) {
          ++num_live;
        }
        return Status();
      });
      if (!status.ok()) report->failures.push_back(status.message());
      if (status.ok() && num_live != segment.num_live) {
        report->failures.push_back(log->segment_path(segment) + ": footer names " + std::to_string(segment.num_live) + " newest records, found " +
                                   std::to_string(num_live));
      }
      report->num_live_records += num_live;
    }
  }
  return {};
}

}  // namespace kstep
